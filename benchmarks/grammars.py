"""Answers under grammars: whether they are valid, what masks cost, and what speculation brings.

    python benchmarks/grammars.py valid --schemas 1000 --concurrency 1,8,32 --max-tokens 160 --out valid
    python benchmarks/grammars.py masks --text shared/data
    python benchmarks/grammars.py speed

``valid`` answers generated schemas with the bundled pair (or ``--target`` and ``--drafter``), a third of them greedy, a third
sampled and a third sampled with a seed, and checks every answer with the jsonschema package. An answer that was cut at
--max-tokens is checked as far as it goes: its tokens must be a beginning that the grammar allows. What is done is kept in --out
after every few answers, and the same command goes on from there.

``masks`` times, for a vocabulary of 151,936 tokens (``--tokenizer``, or BPE trained on the JSONL files of a folder), the masks of
a chain of 15 draft tokens along answers to such schemas, and what applying them takes. It counts CPU time and compares it with a
cycle of one request with such a chain, measured with ``--pair`` (a folder that benchmarks/inflate.py made, in bf16), or with
``--pass-ms``. A greedy pass pays for the masks and for choices under them, a sampled one for the masks and for what
distributions under them take beyond those of free rows.

``speed`` compares the default policy with plain decoding (without a drafter, and with the same masks) on the same prompts, prompt
by prompt in turn; each form of answers has an engine whose policy learns from it alone. It begins no round that --minutes would
not see the end of. Free answers run on to --max-tokens where answers under a grammar end by themselves, and long greedy texts
repeat themselves; a third row has free answers as long as those under a grammar.

Each prints a Markdown table; ``valid`` exits with 1 if an answer was wrong.
"""

import argparse
import json
import math
import random
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.kept import Kept
from volley import Engine, Grammar, SamplingParams
from volley.decode.grammars import Grammars
from volley.decode.rules import Constraint, allowed_choice, allowed_probs
from volley.decode.sampling import token_probs
from volley.prompts import read_jsonl
from volley.types import GenerationResult

WORDS = (
    "name",
    "kind",
    "tags",
    "size",
    "unit price",
    "löschen",
    "items",
    "note",
    "isOpen",
    "id",
    "path",
    "date_of_birth",
)
FORMATS = ("date", "time", "uuid", "ipv4", "email")
RFC_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII | re.IGNORECASE
)
ROWS = 16


def make_schema(seed: int) -> dict[str, Any]:
    """An object with random properties; the same for the same seed."""
    chance = random.Random(seed)
    schema = an_object(chance, 3)
    if chance.random() < 0.2:
        schema["$defs"] = {"shared": an_object(chance, 1), "list": {"type": ["object", "null"], **linked()}}
        schema["properties"]["shared"] = {"$ref": "#/$defs/shared"}
        schema["properties"]["chain"] = {"$ref": "#/$defs/list"}
    return schema


def linked() -> dict[str, Any]:
    properties = {"value": {"enum": [1, 2, 3]}, "next": {"$ref": "#/$defs/list"}}
    return {"properties": properties, "required": ["value", "next"], "additionalProperties": False}


def an_object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: a_value(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def a_value(chance: random.Random, depth: int) -> dict[str, Any]:
    low, few = chance.randint(-50, 50), chance.randint(0, 2)
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": chance.randint(0, 20)},
        {"type": "string", "minLength": few, "maxLength": 12},
        {"type": "string", "pattern": chance.choice(["^[A-Z]{2}-[0-9]{3}$", "^(yes|no|maybe)$", "^#[0-9a-f]{6}$"])},
        {"type": "string", "format": chance.choice(FORMATS)},
        {"enum": chance.sample(["red", "green", 'a "quoted" one', 7, None, True, [1, "x"], {"k": 2}], 3)},
        {"const": chance.choice(["fixed", 12, {"a": [1, 2]}])},
        {"type": "integer", "minimum": low, "maximum": low + chance.choice([0, 5, 10**6])},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
        {"type": chance.choice(["boolean", "null", "integer"])},
        {"type": ["string", "null"], "maxLength": 5},
    ]
    if depth <= 0 or chance.random() < 0.5:
        return chance.choice(leaves)
    deeper: list[dict[str, Any]] = [
        an_object(chance, depth),
        {"type": "array", "items": a_value(chance, depth - 1), "minItems": few, "maxItems": few + chance.randint(0, 2)},
        {"type": "array", "prefixItems": [a_value(chance, 0), a_value(chance, 0)], "items": False, "minItems": 2},
        {"anyOf": [a_value(chance, depth - 1), {"type": "boolean"}]},
    ]
    return chance.choice(deeper)


def checker() -> jsonschema.FormatChecker:
    """Formats as the package checks them, but for two of RFC 3339.

    It has a year 0000, a leap year, which Python's dates lack, and its times have an offset; the package knows times of draft 3.
    """
    formats = jsonschema.FormatChecker(FORMATS)

    @formats.checks("date", ValueError)
    def is_date(value: object) -> bool:
        return not isinstance(value, str) or bool(date.fromisoformat(re.sub("^0000", "2000", value)))

    @formats.checks("time")
    def is_time(value: object) -> bool:
        return not isinstance(value, str) or RFC_TIME.fullmatch(value) is not None

    return formats


def problem_of(result: GenerationResult, schema: dict[str, Any], grammars: Grammars) -> str | None:
    """What is wrong with an answer, if anything is."""
    if result.finish_reason == "length":
        rule = grammars.rule(Grammar.json_schema(schema))
        return None if rule.num_allowed(result.token_ids) == len(result.token_ids) else "cut, and not allowed so far"
    try:
        jsonschema.validate(json.loads(result.text), schema, format_checker=checker())
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def ask(schema: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Answer with JSON for this schema: {json.dumps(schema)[:400]}"}]


def params_for(index: int, schema: dict[str, Any], max_tokens: int) -> SamplingParams:
    """A third greedy, a third sampled, a third sampled with a seed."""
    kind: dict[str, Any] = ({}, {"temperature": 1.0}, {"temperature": 0.8, "seed": index, "top_p": 0.95})[index % 3]
    return SamplingParams(grammar=Grammar.json_schema(schema), max_tokens=max_tokens, **kind)


def check_valid(
    engine: Engine, schemas: dict[int, dict[str, Any]], max_tokens: int
) -> tuple[Counter[str], list[str], list[int]]:
    """How many answers ended how, what was wrong with any, and tokens and cycles; as many run at once as the engine holds.

    The number of a schema decides whether its answer is sampled.
    """
    ended, problems, taken = Counter[str](), list[str](), list[int]()
    each = [params_for(number, schema, max_tokens) for number, schema in schemas.items()]
    for schema, result in zip(schemas.values(), engine.generate(map(ask, schemas.values()), each), strict=True):
        ended[result.finish_reason] += 1
        taken += result.stats.accepted_lengths
        if (problem := problem_of(result, schema, engine.grammars)) is not None:
            problems.append(f"{problem}\n{json.dumps(schema)}\n{result.text}")
    engine.check_integrity()
    return ended, problems, [sum(taken), len(taken)]


def run_valid(options: argparse.Namespace) -> int:
    named = ("policy", "target", "drafter", "dtype", "max_tokens")
    kept = Kept(options.out / "valid.json", {name: getattr(options, name) for name in named})
    for concurrency in map(int, options.concurrency.split(",")):
        done = {number for row in kept.rows if row["at_once"] == concurrency for number in row["schemas"]}
        left = [number for number in range(options.first, options.first + options.schemas) if number not in done]
        if not left:
            continue
        engine, size = load(options, max_running=concurrency), max(10, 3 * concurrency)
        for start in range(0, len(left), size):
            schemas = {number: make_schema(number) for number in left[start : start + size]}
            started = time.perf_counter()
            ended, problems, (tokens, cycles) = check_valid(engine, schemas, options.max_tokens)
            seconds = time.perf_counter() - started
            kept.add(
                at_once=concurrency,
                schemas=[*schemas],
                ended=ended,
                problems=problems,
                tokens=tokens,
                cycles=cycles,
                seconds=seconds,
            )
            told = f"{len(done) + start + len(schemas)} of {options.schemas} schemas, {concurrency} at once"
            print(f"{told}: {len(problems)} wrong, {seconds:.0f} s", *problems[:5], sep="\n", file=sys.stderr)
    print(valid_table(kept.rows, options.policy or "default"))
    return int(any(row["problems"] for row in kept.rows))


def valid_table(rows: list[dict[str, Any]], policy: str) -> str:
    lines = ["| at once | policy | schemas | complete | cut at the limit | wrong | τ | seconds |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for concurrency in dict.fromkeys(row["at_once"] for row in rows):
        own = [row for row in rows if row["at_once"] == concurrency]
        ended = sum((Counter(row["ended"]) for row in own), Counter[str]())
        wrong, seconds = sum(len(row["problems"]) for row in own), sum(row["seconds"] for row in own)
        tau = sum(row["tokens"] for row in own) / sum(row["cycles"] for row in own)
        counts = f"{sum(len(row['schemas']) for row in own)} | {ended['stop']} | {ended['length']} | {wrong}"
        lines.append(f"| {concurrency} | {policy} | {counts} | {tau:.2f} | {seconds:.0f} |")
    return "\n".join(lines)


def load(options: argparse.Namespace, *, is_plain: bool = False, **more: Any) -> Engine:
    named = {"target": options.target, "drafter": options.drafter} if options.target else {}
    policy = {"policy": options.policy} if options.policy else {}
    if is_plain:
        named, policy = {**named, "drafter": None}, {}
    return Engine.from_pretrained(**named, **policy, **more, dtype=getattr(torch, options.dtype))


# -- what masks cost ---------------------------------------------------------------------------------------------------


def large_tokenizer(folder: Path, size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of ``size`` tokens from the texts of a folder's JSONL files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(  # type: ignore[call-arg]
        vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    texts = (
        json.dumps(row, ensure_ascii=False) for path in sorted(folder.glob("*.jsonl")) for _, row in read_jsonl(path)
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def answer_to(rule: Constraint, chance: random.Random, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """A random answer that the grammar allows, at most 200 tokens long."""
    tokens: list[int] = []
    while len(tokens) < 200 and (mask := rule.mask(tokens)) is not None:
        allowed = torch.from_numpy(mask).nonzero()[:, 0].tolist()
        byte = chance.choice(allowed)
        tokens.append(byte * 8 + chance.choice([bit for bit in range(8) if mask[byte] >> bit & 1]))
        if tokens[-1] == tokenizer.eos_token_id:
            return tokens[:-1]
    return tokens


def run_masks(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    if options.tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    else:
        tokenizer = large_tokenizer(options.text, options.vocab)
    grammars, chance = Grammars(tokenizer, options.vocab, {tokenizer.eos_token_id}), random.Random(0)
    started = time.process_time()
    grammars.compile(Grammar.json_object())
    reading = time.process_time() - started
    logits, params = torch.randn(ROWS, options.vocab), SamplingParams(temperature=1.0)
    compiling, masking, choosing, free, bound, greedy, sampled = [], [], [], [], [], [], []
    for seed in range(options.first, options.first + options.schemas):
        grammar = Grammar.json_schema(make_schema(seed))
        started = time.process_time()
        grammars.compile(grammar)
        compiling.append(time.process_time() - started)
        rule = grammars.rule(grammar)
        answer = answer_to(grammars.rule(grammar), chance, tokenizer)
        while len(answer) >= ROWS:
            paths = [tuple(answer[:count]) for count in range(ROWS)]
            started = time.process_time()
            for path in paths:
                rule.mask(path)
            masking.append(time.process_time() - started)
            best = [int(row.argmax()) for row in logits]
            started = time.process_time()
            for place, token in enumerate(answer[:ROWS]):
                best[place] = token  # a target that mostly wants what is allowed
            for row, token, path in zip(logits, best, paths, strict=True):
                allowed_choice([rule], row, token, path)
            choosing.append(time.process_time() - started)
            started = time.process_time()
            token_probs(logits, params)
            free.append(time.process_time() - started)
            started = time.process_time()
            allowed_probs([rule], logits, paths, params)
            bound.append(time.process_time() - started)
            greedy.append(masking[-1] + choosing[-1])
            sampled.append(masking[-1] + bound[-1] - free[-1])
            for token in answer[:ROWS]:
                rule.take(token)
            answer = answer[ROWS:]
    cycle_ms = options.pass_ms if options.pair is None else cycle_of(options.pair)
    print(f"{len(tokenizer)} tokens in the tokenizer, logits of {options.vocab}; read once in {reading:.2f} s")
    print(f"a cycle: {cycle_ms:.1f} ms, {'assumed' if options.pair is None else 'measured'}\n")
    print(
        "| what | median CPU ms | mean | 90 % | 99 % | share of a cycle, median | mean |\n|---|---|---|---|---|---|---|"
    )
    for what, seconds in (
        ("compile a schema, once", compiling),
        (f"masks of {ROWS} rows", masking),
        (f"greedy choices of {ROWS} rows under them", choosing),
        (f"distributions of {ROWS} free rows, T = 1", free),
        (f"distributions of {ROWS} rows under masks, T = 1", bound),
        ("all that masks add to a greedy pass", greedy),
        ("all that masks add to a sampled pass", sampled),
    ):
        cuts = statistics.quantiles([1000 * s for s in seconds], n=100)
        middle, mean = 1000 * statistics.median(seconds), 1000 * statistics.fmean(seconds)
        shares = f"{middle / cycle_ms:.1%} | {mean / cycle_ms:.1%}"
        print(f"| {what} | {middle:.3f} | {mean:.3f} | {cuts[89]:.3f} | {cuts[98]:.3f} | {shares} |")
    return 0


def cycle_of(pair: Path) -> float:
    """Milliseconds of a cycle of one request that drafts and verifies as many rows as are masked."""
    engine = Engine.from_pretrained(pair / "target", pair / "drafter", max_running=1)
    return 1000 * statistics.median(engine.cycle_seconds(ROWS, 1) for _ in range(5))


# -- what speculation brings -------------------------------------------------------------------------------------------


FORMS = ("grammar", "free", "free, as long")
WARMING = 8  # prompts from which policies learn before anything is timed


class Answer(NamedTuple):
    """One answer after its first token."""

    tokens: int
    token_ms: float
    cycle_ms: float
    tau: float


def run_speed(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    drafting, plain = (
        {form: load(options, max_running=1) for form in FORMS},
        load(options, max_running=1, is_plain=True),
    )
    numbers = range(options.first, options.first + options.schemas)
    schemas = [make_schema(number) for number in numbers]
    answers: Answers = defaultdict(list)
    started, longest = time.monotonic(), 0.0
    for round_ in range(options.rounds + 1):
        begun = time.monotonic()
        if round_ > 1 and begun - started + longest > 60 * options.minutes:
            print(f"no time for round {round_} of {options.rounds}", file=sys.stderr)
            break
        asked = schemas if round_ else [make_schema(numbers.stop + more) for more in range(WARMING)]
        found: dict[tuple[str, str], list[Answer]] = defaultdict(list)
        for index, schema in enumerate(asked):
            for form in FORMS:
                most = found[FORMS[0], "drafting"][-1].tokens if form == FORMS[-1] else options.max_tokens
                for kind, engine in (("plain", plain), ("drafting", drafting[form]))[:: -1 if index % 2 else 1]:
                    found[form, kind].append(answer_of(engine, schema, form, most, options))
        if round_:  # the first warms up, and the policies learn
            for own, each in found.items():
                answers[own].append(each)
            longest = max(longest, time.monotonic() - begun)
        print(f"round {round_}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    print(speed_table(answers))
    return 0


Answers = dict[tuple[str, str], list[list[Answer]]]


def gains_of(answers: Answers, form: str) -> list[float]:
    """How many times as fast each prompt was answered as by plain decoding, from medians over rounds."""
    plain, fast = (
        [statistics.median(own.token_ms for own in rounds) for rounds in zip(*answers[form, kind], strict=True)]
        for kind in ("plain", "drafting")
    )
    return [one / other for one, other in zip(plain, fast, strict=True)]


def speed_table(answers: Answers) -> str:
    """Each prompt's medians over rounds, then the median over prompts; τ is that of all cycles."""
    lines = [
        "| answers | tokens | plain, ms a token | default policy | speedup, median over prompts | τ | cycle, of plain |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for form in FORMS:
        plain, fast = ([*zip(*answers[form, kind], strict=True)] for kind in ("plain", "drafting"))
        cycle = statistics.median(
            statistics.median(own.cycle_ms for own in other) / statistics.median(own.cycle_ms for own in one)
            for one, other in zip(plain, fast, strict=True)
        )
        flat = [own for rounds in fast for own in rounds]
        tau = sum(own.tokens for own in flat) / sum(own.tokens / own.tau for own in flat)
        tokens = statistics.median(own.tokens for own in flat)
        times = " | ".join(
            f"{statistics.median(statistics.median(own.token_ms for own in rounds) for rounds in kind):.2f}"
            for kind in (plain, fast)
        )
        gain = statistics.median(gains_of(answers, form))
        lines.append(f"| {form} | {tokens:.0f} | {times} | {gain:.2f}× | {tau:.2f} | {cycle:.2f}× |")
    (ratio, low, high), count = ratio_of_gains(answers), len(answers[FORMS[0], "plain"][0])
    return "\n".join(lines) + (
        "\n\nSpeedup under a grammar over that of the free answer as long, geometric mean over "
        f"{count} prompts: {ratio:.3f}, 90 % interval {low:.3f} to {high:.3f}"
    )


def ratio_of_gains(answers: Answers, drawn: int = 2000) -> tuple[float, float, float]:
    """The speedup of an answer under a grammar over that of the free answer as long to the same prompt: geometric mean over
    prompts, and its 90 % interval by a bootstrap over them."""
    logs = [math.log(one / other) for one, other in zip(*(gains_of(answers, form) for form in FORMS[::2]), strict=True)]
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(logs, k=len(logs))) for _ in range(drawn))
    return math.exp(statistics.fmean(logs)), math.exp(means[drawn // 20]), math.exp(means[-1 - drawn // 20])


def answer_of(engine: Engine, schema: dict[str, Any], form: str, most: int, options: argparse.Namespace) -> Answer:
    grammar = Grammar.json_schema(schema) if form == "grammar" else None
    params = SamplingParams(
        grammar=grammar,
        max_tokens=max(2, most),
        temperature=options.temperature,
        seed=None,
        ignore_eos=form == FORMS[-1],
    )
    engine.reset_prefix_cache()  # the drafter keeps its own for fewer prompts than these
    (result,) = engine.generate([ask(schema)], params)
    token = 1000 / max(result.stats.decode_tokens_per_second, 1e-9)
    tau = result.stats.acceptance_length or 1.0
    return Answer(len(result.token_ids), token, token * tau, tau)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in (("valid", run_valid), ("masks", run_masks), ("speed", run_speed)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--schemas", type=int, default={"valid": 1000, "masks": 40, "speed": 20}[name])
        command.add_argument("--first", type=int, default=0, help="the number of the first schema")
        if name == "masks":
            source = command.add_mutually_exclusive_group(required=True)
            source.add_argument("--text", type=Path, help="folder of JSONL files to train a tokenizer on")
            source.add_argument("--tokenizer", help="folder or hub name of a tokenizer")
            command.add_argument("--vocab", type=int, default=151_936)
            command.add_argument("--pass-ms", type=float, default=30.0)
            command.add_argument("--pair", type=Path, help="folder with target and drafter whose cycle is measured")
        else:
            command.add_argument("--target")
            command.add_argument("--drafter")
            command.add_argument("--policy")
            command.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
            command.add_argument("--max-tokens", type=int, default=160 if name == "valid" else 96)
        if name == "valid":
            command.add_argument("--concurrency", default="1,8,32")
            command.add_argument("--out", type=Path, default=Path("grammars"))
        if name == "speed":
            command.add_argument("--rounds", type=int, default=3)
            command.add_argument("--minutes", type=float, default=4.0)
            command.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    sys.exit(options.run(options))
