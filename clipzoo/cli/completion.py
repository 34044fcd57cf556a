"""Shell completion: `eval "$(register-python-argcomplete clipzoo)"` switches it on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO


def complete_if_asked(parser: argparse.ArgumentParser) -> None:
    """Answer the shell's request for completions and exit. No-op outside completion."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)


def override_completer(config_name: str) -> Callable[..., list[str]]:
    """Return an argcomplete completer of Hydra overrides for the configuration `config_name`."""

    def complete(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
        from clipzoo.cli.train import job
        from clipzoo.config.groups import own_folder

        own = own_folder()
        folder = [] if own is None else ["--config-dir", str(own)]
        hide_internal_options()
        sys.argv = ["clipzoo", "--config-name", config_name, *folder, "--shell-completion", "query=bash"]
        os.environ["COMP_LINE"] = " ".join(["clipzoo", *(parsed_args.overrides or []), prefix])
        with redirect_stdout(StringIO()) as completions:
            job()
        return completions.getvalue().split()

    return complete


def hide_internal_options() -> None:
    """Keep Hydra's help and completion from listing files that begin with an underscore: parts that options share."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.object_type import ObjectType
    from hydra.core.plugins import Plugins

    class Listed(FileConfigSource):
        def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
            return [name for name in super().list(config_path, results_filter) if not name.startswith("_")]

    Plugins.instance()  # fills the registry
    SourcesRegistry.instance().types[Listed.scheme()] = Listed
