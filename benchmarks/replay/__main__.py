"""Replay a published table: published, predicted, error.

    python -m benchmarks.replay torchtitan
    python -m benchmarks.replay optimus
    python -m benchmarks.replay pipelines

Needs no GPU, no weights and no network: models are shapes on the meta device. `--write` puts the result into
docs/benchmarks/replay.md (of pipelines: pipelines.md), which says how the predictions are made and where they miss.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence

from benchmarks.replay import report
from benchmarks.replay.optimus import fitted, optimus, predicted
from benchmarks.replay.optimus_report import optimus_cells, optimus_notes
from benchmarks.replay.pipelines import pipelines, predictions
from benchmarks.replay.pipelines_report import pipeline_cells, pipeline_notes
from benchmarks.replay.predict import fitted_rate, plan_of, predict, seconds_of, with_rate
from benchmarks.replay.rows import Table, machine, torchtitan
from cost_models.hardware import Hardware


def outcomes_of(table: Table, only: Sequence[str] = ()) -> tuple[list[report.Outcome], dict[str, float]]:
    """The modelled rows of the data file, or those of `only`, predicted; and the rates of products that were fitted, by
    machine, before it predicts.
    """
    chosen = [table.row(name) for name in only] or [row for row in table.rows if row.use != "not modelled"]
    if refused := [row.name for row in chosen if row.use == "not modelled"]:
        raise ValueError(f"row {refused[0]} is not modelled: {table.row(refused[0]).why}")
    rates: dict[str, float] = {}
    for profile, row in table.fitted_on.items():
        if any(one.source.hardware == profile for one in chosen):
            hardware = machine(row.source.hardware)
            rates[profile] = fitted_rate(row, hardware, plan_of(row, hardware))
    outcomes: list[report.Outcome] = []
    for row in chosen:
        hardware = machine(row.source.hardware)
        plan = plan_of(row, hardware)
        prediction = predict(row, with_rate(hardware, rates[hardware.name]), plan)
        outcomes.append(report.Outcome(row, prediction, seconds_of(row, hardware, plan)))
        _progress(f"{row.name}: {prediction.seconds:.3f} s a step")
    return outcomes, rates


def replay_torchtitan(only: Sequence[str], page: bool) -> str:
    table = torchtitan()
    outcomes, rates = outcomes_of(table, only)
    show = report.markdown if page else report.text
    parts = [show(report.outcome_cells(outcomes)), _list(report.summary(outcomes), page)]
    parts += ["Fitted:", _list(report.fits(table, rates), page)]
    if not only:
        parts += ["Not modelled:", show(report.not_modelled(table))]
    if page:
        told = [
            f"{source.url} ({source.date}), on {source.hardware}. {source.about}" for source in table.sources.values()
        ]
        parts += ["Sources:", _list(told, page)]
    return "\n\n".join(part.rstrip("\n") for part in parts)


def replay_optimus(only: Sequence[str], page: bool) -> str:
    table = optimus()
    hardware = fitted(table, Hardware.load(table.hardware))
    rows = [table.row(name) for name in only] or list(table.rows)
    predictions = [predicted(row, table, hardware) for row in rows]
    show = report.markdown if page else report.text
    notes = _list(optimus_notes(table, hardware, predictions), page)
    return f"{show(optimus_cells(predictions))}\n{notes}".rstrip("\n")


def replay_pipelines(only: Sequence[str], page: bool) -> str:
    table = pipelines()
    found, rates = predictions(table, [table.row(name) for name in only] or list(table.rows))
    show = report.markdown if page else report.text
    notes = _list(pipeline_notes(table, found, rates), page)
    return f"{show(pipeline_cells(table, found))}\n{notes}".rstrip("\n")


TABLES = {"torchtitan": replay_torchtitan, "optimus": replay_optimus, "pipelines": replay_pipelines}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=tuple(TABLES))
    parser.add_argument("--rows", nargs="+", default=(), metavar="ROW", help="only these rows of the data file")
    parser.add_argument("--write", action="store_true", help="put all rows into the page of the table")
    given = parser.parse_args(arguments)
    if given.write and given.rows:
        parser.error("--write is for the whole table; leave --rows away")
    gc.disable()  # millions of small values, and no circles worth the search for them
    try:
        answer = TABLES[given.table](given.rows, given.write)
    except ValueError as error:
        parser.error(str(error))
    finally:
        gc.enable()
    if given.write:
        report.write(given.table, answer, time.process_time())
    print(answer)
    return 0


def _list(lines: Sequence[str], page: bool) -> str:
    return "".join(f"- {line}\n" if page else f"{line}\n" for line in lines)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
