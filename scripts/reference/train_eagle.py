"""An EAGLE-3 drafter for a target, written as such drafters are published. A baseline for the bench.

    python scripts/reference/train_eagle.py --target MODEL.gguf --data responses.jsonl --out runs/eagle --minutes 20

Training-time test (Li et al. 2025, §3.2): step 0 reads the target's states, each later step what the step before it made of the
position before. All steps see the text's own tokens and learn the target's distributions. The text is the target's responses
(``volley collect``). As in ``volley train`` the head is the target's, the loss looks at frequent tokens and a sample, and the
drafter drafts as many tokens as promise most speed. A run that finds its checkpoint goes on from it. ``--minutes`` are of CPU
time.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.reference import distil
from volley.files import REFERENCE, write_atomically
from volley.models.checkpoints.eagle_format import usual_taps
from volley.models.checkpoints.formats import parse_config
from volley.models.drafters.eagle import EagleDrafter
from volley.tensors import save_tensors
from volley.train.begin import soften
from volley.train.documents import Document, response_counts
from volley.train.features import FrozenTarget, OnlineFeatures
from volley.train.fused import fuse
from volley.train.losses import Objective, block_loss
from volley.train.vocabulary import LossTokens, choose_vocabulary, loss_tokens

DECAY = 0.8


def published_config(theirs: PreTrainedConfig, drafted: int) -> dict:
    """``config.json`` of a drafter with the target's widths that drafts ``drafted`` of its tokens."""
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
        "draft_vocab_size": drafted,
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


def loss_of(
    drafter: EagleDrafter, target: FrozenTarget, tokens: LossTokens | None, ids: Tensor, states: Tensor, steps: int
) -> Tensor:
    """Cross-entropy of every step with the target's distributions; a step less counts ``DECAY`` of the one before.

    ``states [B, T, 4 · H]`` are the tapped ones of tokens ``ids [B, T]``, and those of the last layer.
    """
    total, width = states.new_zeros((), dtype=torch.float32), drafter.config.hidden_size
    with torch.no_grad():
        embeddings, final = target.embed(ids[:, 1:-1]), target.model.get_decoder().norm(states[:, 1:-1, -width:])
    for step, own in enumerate(unroll(drafter, states[:, :-2, :-width], embeddings, steps)):
        rows, goal = (x[:, step:].flatten(0, 1).to(target.dtype) for x in (own, final))
        head, labels = target.head, ids[:, 2 + step :].flatten()  # a position predicts what follows the token after it
        if tokens is not None:
            head, labels = tokens(head, labels, width)
        weights = torch.full((len(labels),), DECAY**step / len(labels))
        total = total + block_loss(rows, head, labels, weights, Objective(1.0), final=goal, measure=False)[0]
    return total


def publish(folder: Path, raw: dict, drafter: EagleDrafter) -> None:
    own = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in drafter.state_dict().items()
    }
    names = {
        name: name.replace("layers.0.", "midlayer.").replace("hidden_norm", "midlayer.hidden_norm") for name in own
    }
    save_tensors(folder / "model.safetensors", {names[name]: tensor for name, tensor in own.items()}, {"format": "pt"})
    write_atomically(folder / "config.json", json.dumps(raw, indent=2) + "\n")


def new_drafter(raw: dict, target: FrozenTarget, counts: Tensor) -> EagleDrafter:
    """Its head is the target's for the tokens that ``counts [V]`` has most of, and its last norm begins as the target's."""
    drafter = EagleDrafter(parse_config(raw))
    assert drafter.lm_head is not None
    drafted = counts.argsort(descending=True, stable=True)[: len(drafter.lm_head.weight)].sort().values
    with torch.no_grad():
        drafter.lm_head.requires_grad_(False).weight.copy_(target.head[drafted])
        drafter.norm.weight.copy_(target.model.get_decoder().norm.weight)
        if drafter.d2t is not None:
            drafter.d2t.copy_(drafted - torch.arange(len(drafted)))
    fuse(drafter)
    return drafter


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(REFERENCE / "target"), help="folder or GGUF file; the bundled one")
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
    target = FrozenTarget(options.target, torch.bfloat16, torch.device("cpu"))
    theirs, rows = target.text_config, distil.training_rows(options.data, target.tokenizer)
    texts = [Document(row.int(), 0) for row in rows]
    size = choose_vocabulary(texts, target.vocab_size, theirs.hidden_size, target.pass_weights) or target.vocab_size
    raw, tokens = published_config(theirs, size), loss_tokens(texts, target)
    drafter = new_drafter(raw, target, response_counts(texts, target.vocab_size))
    layers = theirs.num_hidden_layers
    source = OnlineFeatures(target, (*usual_taps(layers), layers - 1), with_final=False)

    def loss(ids: Tensor) -> Tensor:
        states = source([Document(row.int(), 0) for row in ids], range(len(ids))).taps
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(drafter, target, tokens, ids, states, options.steps)

    soften(drafter.norm, lambda: loss(rows[:1]).item())
    distil.train(
        drafter,
        rows,
        loss,
        lambda: publish(options.out / "drafter", raw, drafter),
        options.out,
        options.minutes,
        options.rows,
        options.every,
    )


if __name__ == "__main__":
    main()
