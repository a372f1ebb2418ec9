"""Write responses to long contexts, for the drafter: the target goes on from where a longer text or a conversation breaks off.

Texts come from the training split, without the first quarter of the PEPs and of the Rust book, whose beginnings are what
contexts are measured with. Rows hold token ids, and a run goes on where an earlier one stopped.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from corpus import load_chats

from volley import Engine, SamplingParams

SHARES = {"peps": 0.3, "rust_book": 0.12, "python_algorithms": 0.2, "python_functions": 0.13, "turns": 0.25}
UNSEEN_SHARE = {"peps": 0.25, "rust_book": 0.25}
SHORTEST, LONGEST = 200, 850
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
BATCH = 64


def passage(rows: list[tuple[str, str, str]], rng: random.Random, characters: int) -> tuple[str, str]:
    """The question of a row, and as much text from that row on as is asked for."""
    first = rng.randrange(len(rows))
    text = ""
    for _, _, answer in rows[first:]:
        text += answer + "\n\n"
        if len(text) > characters:
            break
    return rows[first][1], text


def prompt_of(engine: Engine, name: str, rows: list[tuple[str, str, str]], rng: random.Random) -> list[int]:
    length = rng.randint(SHORTEST, LONGEST)
    if name != "turns":
        question, text = passage(rows, rng, 8 * length)
        asked = engine.encode([{"role": "user", "content": question}])
        return (asked + engine.encode(text))[:length]
    messages: list[dict[str, str]] = []
    while True:
        _, question, answer = rng.choice(rows)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if len(engine.encode(messages)) > length:
            return engine.encode(messages[:-1])


def prompts(engine: Engine, data: Path, count: int) -> list[list[int]]:
    rng = random.Random(2)
    chats = load_chats(data, held_out=False)
    found = []
    for name, share in SHARES.items():
        if name == "turns":
            rows = [chat for chat in chats if len(chat[1]) + len(chat[2]) < 1500]
        else:
            rows = [chat for chat in chats if chat[0] == name]
            rows = rows[int(UNSEEN_SHARE.get(name, 0) * len(rows)) :]
        found += [prompt_of(engine, name, rows, rng) for _ in range(round(share * count))]
    rng.shuffle(found)
    return [prompt for prompt in found if SHORTEST <= len(prompt) <= LONGEST + 100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = Engine.from_pretrained(options.target)
    wanted = prompts(engine, options.data, options.count)
    with options.out.open("a+", encoding="utf-8") as out:
        out.seek(0)
        done = len(out.readlines())
        for start in range(done, len(wanted), BATCH):
            batch = wanted[start : start + BATCH]
            params = [
                SamplingParams(temperature=TEMPERATURES[place % 4], max_tokens=options.max_tokens, seed=place)
                for place in range(start, start + len(batch))
            ]
            rows = [
                {"prompt_token_ids": prompt, "response_token_ids": list(result.token_ids)}
                for prompt, result in zip(batch, engine.generate(batch, params), strict=True)
            ]
            out.write("".join(json.dumps(row) + "\n" for row in rows))
            out.flush()
            print(f"{start + len(batch)} of {len(wanted)}", flush=True)


if __name__ == "__main__":
    main()
