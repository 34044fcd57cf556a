"""Labels of compared runs."""

from __future__ import annotations

import pytest

from clipzoo.report.statistics import distinct


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["demo-clip+head-clip+seed-0-1a2b3c4d", "demo-clip+head-kme+seed-0-5e6f7a8b"], ["head-clip", "head-kme"]),
        (["a+head-kme+lr-1-00000000", "a+lr-2-00000001"], ["head-kme+lr-1", "lr-2"]),
        (["demo-clip-1a2b3c4d", "demo-clip+head-kme-5e6f7a8b"], ["demo-clip", "head-kme"]),
        (["clip", "kme"], ["clip", "kme"]),
        (["a-1a2b3c4d", "a-5e6f7a8b"], ["a-1a2b3c4d", "a-5e6f7a8b"]),
        (["a+head-kme-1a2b3c4d"], ["a+head-kme-1a2b3c4d"]),
    ],
)
def test_a_label_is_what_tells_a_run_apart(names, labels):
    assert distinct(names) == labels
