"""Command ``volley tune``: collects, trains, measures, certifies and exports a drafter."""

from functools import partial

import typer

from volley.options import expand
from volley.tune.options import TuneConfig


@expand
def tune(config: TuneConfig) -> None:
    """Tune a drafter to a model and its traffic: collect, train, measure, certify, export, report.

    Run again to resume after any stop. Every option can also come from the environment: VOLLEY_MAX_MINUTES=20. Exit code 1 if the
    pair's output was not found lossless.
    """
    from volley.certify.certificate import read_certificate
    from volley.tune.run import tune as run

    out = run(config, partial(typer.echo, err=True))
    if read_certificate(out / "certificate.json")["verdict"] != "lossless":
        raise typer.Exit(1)
