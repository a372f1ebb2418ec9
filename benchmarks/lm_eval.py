"""lm-eval, unchanged, against volley's server and against transformers: the same tasks, the same numbers.

    python benchmarks/lm_eval.py --lm-eval path/to/venv/bin/lm_eval --out lm-eval

lm-eval is run from an environment of its own, made with ``pip install "lm_eval[api,hf]"``. Three small tasks on the bundled pair
need no download: multiple choice (loglikelihood), perplexity (rolling loglikelihood), and generation. Each is run with
transformers in fp32, on the server with the drafter, and on the server without. Prints a Markdown table. Exits with 1 where a
likelihood differs by more than 0.1 % or a score changes with speculation.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.thread_server import serving
from volley import Engine
from volley.files import REFERENCE
from volley.serve.config import ServeConfig
from volley.serve.service import Service

TOLERANCE = 1e-3
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 48, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
SUBJECTS = ("tar", "grep", "a list in Python", "a loaf of bread", "the area of a circle", "git", "a dictionary", "ssh")


def write_tasks(folder: Path) -> None:
    """The tasks and their documents. The questions are made up; what is compared are numbers, not knowledge."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for index, subject in enumerate(SUBJECTS):
        question = f"Question: how do I use or make {subject}?\nAnswer:"
        choices = [f" Begin with {subject}.", " It is not possible.", f" Ask for help with {subject} and wait. ¢ö…"]
        text = f"To use {subject}, first read what is written about {subject}. " * (3 + 5 * index)
        rows.append({"question": question, "choices": choices, "answer": index % 3, "text": text})
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, task in TASKS.items():
        own = {"task": f"volley_{name}", "dataset_path": "json", "test_split": "test", **task}
        own["dataset_kwargs"] = {"data_files": {"test": str(documents.resolve())}}
        (folder / f"{name}.yaml").write_text(json.dumps(own), encoding="utf-8")  # JSON is YAML


def evaluate(lm_eval: Path, tasks: Path, out: Path, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One run of lm-eval; its results and samples by task."""
    command = [str(lm_eval), "run", "--model", model, "--include_path", str(tasks), "--output_path", str(out)]
    command += ["--tasks", ",".join(f"volley_{name}" for name in TASKS), "--log_samples", "--batch_size", "4"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    subprocess.run(command, check=True, env={**os.environ, "OPENAI_API_KEY": "any", "HF_HUB_OFFLINE": "1"})
    (report,) = out.rglob("results_*.json")
    found: dict[str, Any] = {"results": json.loads(report.read_text(encoding="utf-8"))["results"], "answers": {}}
    for name in TASKS:
        (samples,) = out.rglob(f"samples_volley_{name}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text(encoding="utf-8").splitlines()), key=lambda row: row["doc_id"])
        found["answers"][name] = [row["resps"] for row in rows]
    return found


def numbers(answers: Any) -> list[float]:
    """All log-likelihoods in a task's answers."""
    if isinstance(answers, list):
        return [value for item in answers for value in numbers(item)]
    try:
        return [float(answers)] if not isinstance(answers, bool) else []
    except (TypeError, ValueError):
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lm-eval", type=Path, required=True, help="the program, in an environment of its own")
    parser.add_argument("--out", type=Path, default=Path("lm-eval"))
    options = parser.parse_args()
    tasks, target = options.out / "tasks", str(REFERENCE / "target")
    write_tasks(tasks)
    runs = {
        "transformers": evaluate(
            options.lm_eval, tasks, options.out / "hf", "hf", {"pretrained": target, "dtype": "float32"}
        )
    }
    for name, policy in (("volley, drafting", "fixed"), ("volley, plain", "fixed:1")):
        engine = Engine.from_pretrained(dtype=torch.float32, policy=policy)
        config = ServeConfig(port=0)
        arguments = {"model": "volley-reference", "max_length": engine.snapshot().max_tokens}
        arguments |= {"num_concurrent": 4, "tokenizer_backend": "remote"}
        with serving(Service(engine, config, "volley-reference"), config) as url:
            arguments["base_url"] = f"{url}/v1/completions"
            out = options.out / name.split()[-1]
            runs[name] = evaluate(options.lm_eval, tasks, out, "local-completions", arguments)
    return report(runs)


def report(runs: dict[str, Any]) -> int:
    reference, *others = runs.values()
    failures = 0
    print("\n| task | metric | " + " | ".join(runs) + " |")
    print("|---|---|" + "---|" * len(runs))
    for task, scores in reference["results"].items():
        for metric, value in scores.items():
            if isinstance(value, float) and "stderr" not in metric:
                cells = [run["results"][task][metric] for run in runs.values()]
                print(f"| {task} | {metric.split(',')[0]} | " + " | ".join(f"{cell:.6g}" for cell in cells) + " |")
                failures += any(not math.isclose(cell, value, rel_tol=TOLERANCE) for cell in cells)
                failures += cells[1] != cells[2]
    for name in ("choice", "perplexity"):
        want = numbers(reference["answers"][name])
        for run in others:
            got = numbers(run["answers"][name])
            assert len(got) == len(want) > 0
            worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
            print(f"{name}: {len(got)} log-likelihoods, largest relative difference {worst:.2g}")
            failures += worst > TOLERANCE
    texts = [run["answers"]["generation"] for run in runs.values()]
    print(
        f"generation: texts equal to transformers': {texts[1] == texts[0]}, with and without drafts: {texts[1] == texts[2]}"
    )
    failures += texts[1] != texts[2]
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
