"""What the benchmark of a shift says of its figures."""

from typing import Any

from benchmarks.shift import bootstrap, to_table


def served(phase: str, tokens: int, tau: float, static: float) -> dict[str, Any]:
    return {"step": "serve", "phase": phase, "served": tokens, "tau": tau, "static": static, "training": 60}


def test_what_a_phase_had_lost_is_measured_from_where_it_began() -> None:
    """There and back: a drafter that serves prose well has lost code, which the static one knows."""
    rows = [
        served("code", 2000, 2.1, 2.1),
        served("code", 4000, 2.3, 2.3),
        {"step": "round", "phase": "prose", "served": 0, "swap": True},
        served("prose", 2000, 1.2, 1.2),
        served("prose", 4000, 1.7, 1.3),
        served("prose", 6000, 2.1, 1.2),
        served("back", 2000, 1.7, 2.2),
        served("back", 4000, 2.1, 2.2),
    ]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in to_table(rows).splitlines()[2:]]
    assert [(row[0], row[1], row[4]) for row in cells] == [
        ("code", "2000", "–"),
        ("code", "4000", "–"),
        ("prose", "2000", "0%"),
        ("prose", "4000", "50%"),
        ("prose", "6000", "90%"),
        ("back", "2000", "0%"),
        ("back", "4000", "80%"),
    ]


def test_a_phase_that_lost_nothing_has_nothing_to_bring_back() -> None:
    rows = [served("code", 2000, 2.2, 2.2), served("math", 2000, 2.19, 2.2), served("math", 4000, 2.3, 2.2)]
    assert "%" not in to_table(rows)


def test_a_figure_comes_with_its_spread() -> None:
    found = bootstrap([[1.0, 2.0]] * 20, lambda rows: sum(a for a, _ in rows) / sum(b for _, b in rows))
    assert found == {"ratio": 0.5, "95%": [0.5, 0.5]}
