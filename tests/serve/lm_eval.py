"""Tasks of lm-eval that need no download, and a run of the program in an environment of its own.

Multiple choice (loglikelihood), perplexity (rolling loglikelihood) and generation.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

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
