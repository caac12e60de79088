# PYTHON_ARGCOMPLETE_OK
"""The table of commands. The module of a command is imported when the command runs, so that `--help` is quick."""

import argparse
import difflib
import os
import sys
from dataclasses import dataclass
from importlib import import_module

from service import __version__

DISTRIBUTION = "quartet-serving"
OURS = frozenset({"quartet", "service", "model", "export"})
STATUS = """\
exit status:
  0  the command did what it says
  1  it failed: the last line of its output has the reason (predict: rows failed; compare: beyond a limit;
     serve: the port is busy)
  2  wrong arguments, settings or input files
  3  serve, predict, compare: the model cannot be opened, or needs more memory than the limit
  4  serve: the service cannot recover

Completion of commands and options: eval "$(quartet completion bash)", or zsh, fish.
"""


@dataclass(frozen=True)
class Command:
    """A command.

    module: has `main`, which reads `sys.argv` and returns the exit status
    extra: the extra of the distribution that the module needs, "" for none
    arguments: the module that has `parser`, if another one, because `module` imports slow libraries
    """

    module: str
    summary: str
    example: str
    extra: str = ""
    arguments: str = ""

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the command, with its example."""
        parser = import_module(self.arguments or self.module).parser()
        parser.epilog = f"Example: {self.example}"
        assert isinstance(parser, argparse.ArgumentParser)
        return parser


COMMANDS = {
    "serve": Command(
        "quartet.serve",
        "serve models over HTTP: bundles, checkpoints, ONNX graphs, names on the hub",
        "quartet serve sentence-transformers/all-MiniLM-L6-v2 --port 8080",
    ),
    "train": Command(
        "quartet.train",
        "train a head on a file of labeled texts, and write a bundle to serve",
        "quartet train reviews.csv",
        "train",
    ),
    "export": Command(
        "export.__main__",
        "write a checkpoint or an ONNX graph as a checked bundle",
        "quartet export ./my-checkpoint bundles/mine --precision int8 fp32",
        "train",
        "export.arguments",
    ),
    "evaluate": Command(
        "model.evaluate",
        "measure the heads of a checkpoint on labeled files",
        "quartet evaluate runs/reviews/checkpoint --eval reviews=test.csv",
        "train",
        "model.evaluate_arguments",
    ),
    "predict": Command(
        "service.predict",
        "write the predictions for each row of a file",
        "quartet predict bundles/reviews new.csv predicted.csv",
    ),
    "bench": Command(
        "quartet.bench",
        "measure a model on this machine: texts per second, latency, memory",
        "quartet bench bundles/reviews",
    ),
    "plan": Command(
        "quartet.plan",
        "state how many replicas keep a latency under a load, by a simulation",
        "quartet plan bundles/reviews --rate 500 --lengths tokens.txt --p99 100",
    ),
    "compare": Command(
        "quartet.compare",
        "compare two servers, bundles or checkpoints, and name the cause of a difference",
        "quartet compare http://localhost:8080 bundles/mine --texts sample.txt",
    ),
    "replay": Command(
        "quartet.replay",
        "make an answer again from its receipt, and compare both",
        "quartet replay RECEIPT 'It was worth the wait.' --model bundles/reviews",
    ),
    "doctor": Command(
        "quartet.doctor", "check this machine and this installation", "quartet doctor"
    ),
    "pull": Command(
        "quartet.pull",
        "export a model into the cache, or into a file for a machine without network",
        "quartet pull intfloat/e5-small-v2 --to e5.tar",
    ),
    "list": Command("quartet.list_models", "list the models in the cache", "quartet list"),
    "remove": Command(
        "quartet.remove", "remove models from the cache", "quartet remove intfloat/e5-small-v2"
    ),
    "keys": Command("service.keys", "make an API key", "quartet keys alice >> keys.toml"),
}


def main() -> int:
    """Run the command that `sys.argv` names. Returns its exit status."""
    if "_ARGCOMPLETE" in os.environ:
        complete()
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(overview(), end="")
        return 0
    if name in ("version", "--version"):
        print(f"quartet {__version__}")
        return 0
    if name == "completion" and rest[:1] in (["-h"], ["--help"]):
        print('usage: eval "$(quartet completion bash)", or zsh, fish, powershell')
        return 0
    if name == "completion":
        return print_completion(*rest)
    if name not in COMMANDS:
        closest = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {closest[0]}?)" if closest else ""
        return fail(f"no command {name}{hint}; quartet --help lists the commands")
    return run(name, rest)


def run(name: str, arguments: list[str]) -> int:
    """Run a command. Returns its exit status."""
    command = COMMANDS[name]
    sys.argv = [f"quartet {name}", *arguments]
    try:
        if {"-h", "--help"} & {*arguments}:
            command.parser().print_help()
            return 0
        status: int | None = import_module(command.module).main()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in OURS or not command.extra:
            raise
        extra = f'"{DISTRIBUTION}[{command.extra}]"'
        return fail(f"{name} needs {package}, which is not installed: pip install {extra}", 1)
    except KeyboardInterrupt:
        return 130
    return status or 0


def overview() -> str:
    """Return the help text of `quartet`."""
    lines = ["usage: quartet COMMAND ...", "", "Serve and train BERT-family encoders.", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {name:<9} {command.summary}"]
    lines += ["  version   print the version", ""]
    lines += ["examples:", *(f"  {command.example}" for command in COMMANDS.values()), ""]
    return "\n".join([*lines, "quartet COMMAND --help describes a command.", "", STATUS])


def fail(message: str, status: int = 2) -> int:
    """Print one line on standard error. Returns the exit status."""
    print(f"quartet: {message}", file=sys.stderr)
    return status


def print_completion(shell: str = "bash") -> int:
    """Print the code by which a shell completes the commands and their options."""
    from argcomplete.shell_integration import shellcode

    try:
        print(shellcode(["quartet"], shell=shell))
    except KeyError:
        return fail(f"completion: no shell {shell}: bash, zsh, fish or powershell")
    return 0


def complete() -> None:
    """Answer a shell that completes a command line, and end the process."""
    import argcomplete

    line = os.environ.get("COMP_LINE", "").split()
    parser = argparse.ArgumentParser("quartet")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        parents = []
        if name in line[1:2]:
            sys.argv = [f"quartet {name}"]
            parents = [command.parser()]
        commands.add_parser(name, parents=parents, add_help=False)
    argcomplete.autocomplete(parser)
