"""The page of `clipzoo explore`, served by the command or complete in one file."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from clipzoo.report.render import TEMPLATES, html_page


def explorer_page(answers: Mapping[str, Any] | None = None) -> str:
    """Render the page. answers: for a page without a server, answers and pictures by path; None asks the server.

    Its policy lets a browser run the script of this page alone, and load nothing from another host.
    """
    script = (TEMPLATES / "explorer.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )
    return html_page("explorer.html.j2", title="clipzoo explore", policy=policy, script=Markup(script), answers=answers)
