"""`bnn-prune RUN`: scores of a Bayes by Backprop posterior after removing its least certain weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from bnn_runner.cli.open_run import add_run_options, open_run, read_options
from bnn_runner.cli.spelling import with_hyphens
from bnn_runner.errors import UserError
from bnn_runner.runtime.exit_codes import run_command
from bnn_runner.runtime.streams import accept_every_text

_EXAMPLES = """RUN is a run's folder, the hash at its end (or its beginning), or: latest.

examples:
  bnn-prune latest                                 0, 50, 75, 90, 95, 98 and 99 % removed
  bnn-prune 73562a9c --fractions 0,25,50 --draws 20

Weights are removed in the order of their signal-to-noise ratio |mean| / standard deviation, the smallest first: mean
and standard deviation are set to zero. The other weights do not change. Writes pruning.csv, pruning.md and
figures/pruning.png into the run's folder. A saved posterior (save_posterior=true) is read; otherwise it is fitted
again.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        argv: The arguments; those of the process by default.

    Returns:
        The exit code: 0 success, 1 the posterior could not be fitted, 2 usage error, 130 interrupted.
    """
    accept_every_text()
    parser = _parser()
    arguments = parser.parse_intermixed_args(with_hyphens(sys.argv[1:] if argv is None else argv))

    def command() -> None:
        read_options(parser, arguments, {"fractions": "fractions"})
        prune(arguments)

    return run_command("bnn-prune", command)


def prune(arguments: argparse.Namespace) -> list[Path]:
    """Opens the run, prunes its posterior, writes and prints the results. Returns the files.

    Raises:
        UserError: For usage errors.
    """
    percents = _percents(arguments.fractions)
    run, folder = open_run(arguments)
    from bnn_runner.methods.bbb import BBB
    from bnn_runner.report import style
    from bnn_runner.report.drawing import attempt
    from bnn_runner.rng import derive_seed
    from bnn_runner.runs import pruning
    from bnn_runner.runs.cell import table_text
    from bnn_runner.runtime.files import write_text
    from bnn_runner.variational.posterior import MeanField

    if not isinstance(run.experiment.method, BBB):
        raise UserError(
            f"bnn-prune requires a factorised Gaussian posterior; got method={run.method}. Give a run of "
            "method=bbb, bbb_flipout or bbb_weights."
        )
    posterior = run.posterior
    assert isinstance(posterior, MeanField)
    settings = run.experiment.settings.eval
    draws = arguments.draws or settings.num_draws
    seed = derive_seed(run.seed, "posterior")
    rows = pruning.prune(run.task, posterior, percents, draws, seed, settings.batch_size)
    name = "test error %" if run.task.spec.kind == "classification" else "test rmse"
    table = pruning.markdown(rows, name)
    columns = [f.name for f in fields(pruning.Pruned)]
    title = f"{run.data} · {run.model} · {run.method} · seed {run.seed}"
    try:
        write_text(folder / "pruning.csv", table_text([asdict(r) for r in rows], columns))
        write_text(folder / "pruning.md", table)
        path = folder / "figures" / "pruning.png"
        ratios = posterior.signal_to_noise()
        picture, note = attempt(path.name, lambda: style.save(pruning.pruning_figure(rows, name, ratios, title), path))
    except OSError as error:
        raise UserError(f"Could not write to {folder} ({error.strerror or error}). Make it writable.") from None
    print(f"{title}, {draws} draws\n\n{table}")
    files = [folder / "pruning.csv", folder / "pruning.md", *([] if picture is None else [picture])]
    if note:
        print(f"note: {note}")
    print("wrote " + ", ".join(str(f) for f in files), flush=True)
    return files


def _percents(text: str) -> list[float]:
    """Parses percentages: "0,50,75"."""
    try:
        percents = [float(word) for word in text.split(",")]
    except ValueError:
        percents = []
    if not percents or not all(0 <= p <= 100 for p in percents):
        raise UserError(f"--fractions must be percentages from 0 to 100, as in 0,50,90; got {text!r}.")
    return percents


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bnn-prune", description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_options(parser)
    parser.add_argument(
        "--fractions",
        default="0,50,75,90,95,98,99",
        metavar="P,P",
        help="percentages to remove (default: 0,50,75,90,95,98,99)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
