"""Run the papers' small experiments.

clipzoo studies                                     all studies, then the page docs/studies/README.md
clipzoo studies study=half_disc                     one study
clipzoo studies study=half_disc study.draws=5       change a setting
clipzoo studies folder=studies jobs=1               write to another folder, one study at a time
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from clipzoo.config.compose import compose
from clipzoo.config.groups import CONF
from clipzoo.config.trust import trusted_names
from clipzoo.distributed.launch import exit_on_error, say
from clipzoo.errors import ConfigError
from clipzoo.io import folder_name
from clipzoo.runs.variables import with_variables

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


@exit_on_error()
def main(arguments: list[str]) -> int:
    """Run the studies of the command line. Returns the exit code: 0, 1 if a study failed, 2 for a wrong argument."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        plain = with_variables(compose(arguments, "studies"))
        _check(plain)
        name = next((text.removeprefix("study=") for text in arguments if text.startswith("study=")), None)
        done = run_all(plain) if name is None else run_one(folder_name(name, "study"), plain, trusted_names(arguments))
    except KeyboardInterrupt:
        say("clipzoo: interrupted; earlier results of the unfinished studies are unchanged")
        return INTERRUPTED
    return 0 if done else 1


def run_one(name: str, plain: dict[str, Any], trust: Collection[str]) -> bool:
    """Run one study in this process and write its folder. Returns False if it failed."""
    import torch

    from clipzoo.build import build_part
    from clipzoo.studies.framework.page import write_page
    from clipzoo.studies.framework.record import write_failure, write_findings

    folder = Path(plain["folder"])
    study = build_part(plain["study"], trust)
    # The matrices are small: a second thread costs more than it gains, and another study may use the core.
    torch.set_num_threads(1)
    say(f"{name}: {study.title}; settings: conf/study/{name}.yaml, results: {folder / name}")
    began, used = time.perf_counter(), time.process_time()
    try:
        findings = study.run()
    except ConfigError:
        # A wrong setting is no failed study: keep the record of an earlier run.
        raise
    except Exception as error:
        # The page names the failure of one study; the other studies continue.
        traceback.print_exc()
        write_failure(folder / name, f"{type(error).__name__}: {error}")
        write_page(folder, plain["studies"])
        return False
    settings = {key: value for key, value in plain["study"].items() if key != "_target_"}
    seconds = {"clock": time.perf_counter() - began, "processor": time.process_time() - used}
    write_findings(folder / name, study, findings, settings, seconds)
    write_page(folder, plain["studies"])
    say(f"{name}: {findings.verdict}")
    return True


def run_all(plain: dict[str, Any]) -> bool:
    """Run each study in its own process, `jobs` at a time. Returns False if one failed."""
    from clipzoo.studies.framework.page import write_page
    from clipzoo.studies.framework.record import write_failure

    folder = Path(plain["folder"])
    processes: list[subprocess.Popen[bytes]] = []

    def run(name: str) -> bool:
        began = time.perf_counter()
        command = [sys.executable, "-m", "clipzoo.studies", f"study={name}", f"folder={folder}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment) as process:
            processes.append(process)
            code = process.wait()
        if code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
            return False
        if code == 2:
            write_failure(folder / name, f"it did not start: clipzoo studies study={name} shows the reason")
        elif code not in (0, 1):
            # The process ended without recording its failure.
            write_failure(folder / name, f"its process ended with code {code}")
        say(f"== {name}: {'done' if code == 0 else 'FAILED'} after {time.perf_counter() - began:.0f} s")
        return code == 0

    with ThreadPoolExecutor(plain["jobs"] or os.cpu_count()) as pool:
        try:
            done = list(pool.map(run, plain["studies"]))
        except KeyboardInterrupt:
            # Do not start the waiting studies; stop the running ones.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise
    say(f"page: {write_page(folder, plain['studies'])}")
    return all(done)


def _check(plain: dict[str, Any]) -> None:
    """Check the values that the schema does not cover, before any study runs."""
    known = sorted(path.stem for path in (CONF / "study").glob("*.yaml"))
    for name in plain["studies"]:
        if name not in known:
            raise ConfigError(f"studies names {name!r}, which is not one of: {', '.join(known)}")
    try:
        Path(plain["folder"]).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder={plain['folder']} cannot be created: {error.strerror}") from None


if __name__ == "__main__":
    if not any(text.startswith("study=") for text in sys.argv):
        # Ending this process ends the studies that it started.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
