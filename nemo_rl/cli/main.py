"""`onehop`: the entry point, its subcommands, and what a user sees when something fails."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from nemo_rl import __version__
from nemo_rl.cli import check, data, export, ppo, report, sft
from nemo_rl.utils.errors import ConfigError, RunError, UserError

EXIT_RUN_FAILED = 1
"""The run started and could not go on, or something happened that nobody foresaw."""
EXIT_BAD_INPUT = 2
"""The input can't be used as given; nothing was started."""

app = typer.Typer(
    name="onehop",
    help="Post-training for language models: one controller, and token tensors that take one hop.",
    epilog="Exit codes: 0 done, 1 the run failed, 2 the input can't be used, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("sft")(sft.sft)
app.command("ppo")(ppo.ppo)
app.command("check")(check.check)
app.add_typer(data.app, name="data")
app.command("export")(export.export)
app.command("report")(report.report)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"onehop {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    debug: Annotated[
        bool, typer.Option("--debug", help="Log everything and show tracebacks. May stand anywhere in the line.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    from nemo_rl.cli.console import configure_logging

    configure_logging(debug=debug)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; `argv` is without the program's name, `sys.argv` by default.

    Errors become one line on stderr each; a `ConfigError` prints one line per problem. Tracebacks appear with
    `--debug` only.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        signal.signal(signal.SIGTERM, _terminate)
    debug = "--debug" in words
    # "run again with --debug" invites people to append it, where click would refuse it.
    words = ["--debug"] * debug + [word for word in words if word != "--debug"]
    try:
        app(words, prog_name="onehop")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_RUN_FAILED
    except Exception as error:  # noqa: BLE001 - the last frame: whatever comes here is told to the user
        return _tell(error, debug)
    return 0


def _terminate(signum: int, frame: object) -> None:
    """Ends the program as an exception does, so that everything it started is ended too."""
    # Said here, because Ray turns the exit code into its own when the signal comes while it waits.
    typer.echo("error: ended by SIGTERM; the same command resumes from the last checkpoint", err=True)
    raise SystemExit(128 + signum)


def _tell(error: Exception, debug: bool) -> int:
    """Print `error` for the user; returns the exit code."""
    if debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, UserError):
        lines = error.problems if isinstance(error, ConfigError) else [str(error)]
        code = EXIT_BAD_INPUT
    elif isinstance(error, RunError):
        lines, code = [str(error)], EXIT_RUN_FAILED
    else:
        message = " ".join(str(error).split()) or "no message"
        lines = [f"{type(error).__name__}: {message}"]
        if not debug:
            lines[0] += " (run again with --debug for the traceback)"
        code = EXIT_RUN_FAILED
    for line in lines:
        typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
        typer.echo(line, err=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
