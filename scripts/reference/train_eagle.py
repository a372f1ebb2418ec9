"""An EAGLE-3 drafter for the bundled target, written as such drafters are published. A baseline for the bench.

    python scripts/reference/train_eagle.py --data responses.jsonl --out runs/eagle --minutes 20

Training-time test (Li et al. 2025, §3.2): step 0 reads the target's states, each later step what the step before it made of the
position before. All steps see the text's own tokens and learn the target's distributions. The text is the target's responses
(``volley collect``). A run that finds its checkpoint goes on from it. ``--minutes`` are of CPU time.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.reference import distil
from volley.files import REFERENCE, write_atomically
from volley.models.checkpoints.eagle_format import usual_taps
from volley.models.checkpoints.formats import parse_config
from volley.models.drafters.eagle import EagleDrafter
from volley.models.targets.taps import Taps
from volley.tensors import save_tensors

DECAY = 0.8


def published_config(target: Qwen3ForCausalLM) -> dict:
    """``config.json`` of a drafter with the target's widths and all of its tokens."""
    theirs = target.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{
            key: getattr(theirs, key)
            for key in ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "rms_norm_eps")
        },
        **{
            key: getattr(theirs, key)
            for key in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
        },
        "draft_vocab_size": theirs.vocab_size,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rope_theta": theirs.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(usual_taps(theirs.num_hidden_layers))},
    }


def unroll(drafter: EagleDrafter, tapped: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
    """Each step's normed states ``[B, T, H]``.

    ``tapped [B, T, 3 · H]`` are the target's states of tokens, ``embeddings [B, T, H]`` those of the tokens after them. Step s at
    position p stands s tokens behind the last state of the target, that of position p − s. It sees the keys of step 0 up to
    there, and one of each step since then. Positions before s have none, and are of no use.
    """
    shape, length = embeddings.shape, embeddings.shape[1]
    positions = torch.arange(length).expand(shape[:2]).flatten()
    states, before, found = drafter.fused_states(tapped), list[tuple[Tensor, Tensor]](), list[Tensor]()
    for step in range(steps):

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor, step: int = step) -> Tensor:
            groups = q.shape[1] // k.shape[1]
            q, k, v = (x.view(*shape[:2], *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            before.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
            seen = torch.ones(length, length, dtype=torch.bool).tril(-step)
            scores = (q @ before[0][0].mT).masked_fill(~seen, -torch.inf)
            own = [(key.roll(step - at, 2), value.roll(step - at, 2)) for at, (key, value) in enumerate(before)][1:]
            ones = [(q * key).sum(-1, keepdim=True) for key, _ in own]
            weights = (torch.cat([scores, *ones], -1) * q.shape[-1] ** -0.5).softmax(-1)
            mixed = weights[..., :length] @ before[0][1]
            for column, (_, value) in enumerate(own, start=length):
                mixed = mixed + weights[..., column : column + 1] * value
            return mixed.transpose(1, 2).flatten(0, 1)

        flat = [x.flatten(0, 1) for x in (embeddings, states)]
        own = drafter.advance(*flat, positions, attend).view(shape)
        found.append(drafter.norm(own))
        states = own.roll(1, 1)
    return found


def loss_of(drafter: EagleDrafter, tapped: Tensor, embeddings: Tensor, logits: Tensor, steps: int) -> Tensor:
    """Cross-entropy of every step with the target's ``logits [B, T, V]``; a step less counts ``DECAY`` of the one before."""
    total = tapped.new_zeros(())
    goal = logits[:, 1:].softmax(-1)  # position p predicts what follows the token after it
    assert drafter.lm_head is not None
    for step, states in enumerate(unroll(drafter, tapped[:, :-1], embeddings[:, 1:], steps)):
        own = drafter.lm_head(states[:, step:])
        total = total + DECAY**step * cross_entropy(own.flatten(0, 1), goal[:, step:].flatten(0, 1))
    return total


def publish(folder: Path, raw: dict, drafter: EagleDrafter) -> None:
    own = {
        name: tensor.to(torch.bfloat16) for name, tensor in drafter.state_dict().items() if tensor.is_floating_point()
    }
    names = {
        name: name.replace("layers.0.", "midlayer.").replace("hidden_norm", "midlayer.hidden_norm") for name in own
    }
    save_tensors(folder / "model.safetensors", {names[name]: tensor for name, tensor in own.items()}, {"format": "pt"})
    write_atomically(folder / "config.json", json.dumps(raw, indent=2) + "\n")


def new_drafter(raw: dict, target: Qwen3ForCausalLM) -> EagleDrafter:
    """Its head begins as the target's, and so does its last norm; embeddings stay the target's."""
    drafter = EagleDrafter(parse_config(raw))
    assert drafter.lm_head is not None
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target.lm_head.weight)
        drafter.norm.weight.copy_(target.model.norm.weight)
    return drafter


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4, help="tokens that are drafted in a row in training")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--rows", type=int, default=4, help=f"of {distil.ROW} tokens, in a step")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    target = Qwen3ForCausalLM.from_pretrained(REFERENCE / "target", dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE / "target")
    raw = published_config(target)
    drafter = new_drafter(raw, target)
    taps = Taps(target, usual_taps(target.config.num_hidden_layers))

    def loss(ids: Tensor) -> Tensor:
        with torch.no_grad():
            logits = target(ids).logits
            tapped, embeddings = taps.take(), target.get_input_embeddings()(ids)
        return loss_of(drafter, tapped, embeddings, logits, options.steps)

    distil.train(
        drafter,
        distil.training_rows(options.data, tokenizer),
        loss,
        lambda: publish(options.out / "drafter", raw, drafter),
        options.out,
        options.minutes,
        options.rows,
        options.every,
    )


if __name__ == "__main__":
    main()
