"""What became of a script's process that could not say so itself, in one sentence."""

from __future__ import annotations

import signal

_NATIVE = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def last_words(answer: str, output: str, who: str = "The script") -> str:
    """One sentence about a child that could not write how it ended.

    ``who`` it was. ``answer`` is the zygote's: an exit status, negative for a signal, or a word of
    its own.

    >>> last_words("-11", "")
    "The script's process crashed in native code (SIGSEGV)."
    """
    lines = [line for line in output.strip().splitlines() if line.strip()]
    said = f" Its last line: {lines[-1][:200]}" if lines else ""
    match answer:
        case "hung":
            return f"The script hung in native code and was ended after its time limit.{said}"
        case "flooded":
            return "The script was ended because it printed more than 256 MiB."
        case "nofork":
            return "The machine could not start a further process: memory or process limit reached."
        case _ if answer.startswith("gone"):
            return f"The process that starts the runs ended early ({answer}). Is memory short?"
    status = int(answer or 0)
    if status == -signal.SIGKILL:
        return (
            "The script was killed (SIGKILL): by itself, by someone, or by the system because "
            f"memory ran out.{said}"
        )
    if status < 0:
        name = signal.Signals(-status).name
        native = -status in _NATIVE
        how = f"crashed in native code ({name})" if native else f"was ended by {name}"
        return f"{who}'s process {how}.{said}"
    return f"{who}'s process ended without a word (status {status}).{said}"
