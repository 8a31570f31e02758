"""The four dashboards: ``python deploy/grafana/build.py`` writes them to ``dashboards/``.

Ratios are rates over rates, weighed by tokens; quantiles are of summed histograms. Nothing is averaged over averages, and where
there is nothing to tell nothing is shown.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "source"))

from cache import CACHE
from fleet import FLEET
from internals import GATEWAY
from tenants import TENANTS

ALL = {"fleet": FLEET, "cache": CACHE, "tenants": TENANTS, "gateway": GATEWAY}


def texts() -> dict[str, str]:
    """File name -> what it is to contain."""
    return {f"{name}.json": json.dumps(each.json(), indent=1) + "\n" for name, each in ALL.items()}


if __name__ == "__main__":
    for name, text in texts().items():
        (Path(__file__).parent / "dashboards" / name).write_text(text)
