"""What came of plans, for people and for programs: a line per run on the terminal, JSON, and one HTML file with its figures inside.

Owns the look of all three. Figures are drawn by `bench/plot.py` (matplotlib, the extra `bench`) and put into the page as SVG.
"""

from __future__ import annotations

import html
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..bench.plot import Line, Panel, draw
from ..simulation.ledger import Moment
from ..simulation.oracle import Prefixes
from ..simulation.planner import Trial
from ..simulation.summary import Slo, Summary
from ..simulation.workload import Workload

COLUMNS: Sequence[tuple[str, str]] = (
    ("TTFT p50", "ttft_p50_s"),
    ("p90", "ttft_p90_s"),
    ("p99", "ttft_p99_s"),
    ("ITL p50", "itl_p50_s"),
    ("p99", "itl_p99_s"),
    ("tokens/s", "output_tokens_per_s"),
    ("cached", "hit_rate"),
    ("busy", "utilisation"),
    ("in time", "slo_share"),
    ("refused", "refusals"),
    ("replica h", "replica_s"),
)
_POINTS = 200


def print_header(workload: Workload, slo: Slo, more: str = "") -> None:
    print(f"workload {workload.name}: " + ", ".join(f"{name} {value}" for name, value in workload.description.items()))
    print(promise_text(slo) + (f"\n{more}" if more else ""))
    print(f"\n{'':<30}" + "".join(f"{title:>10}" for title, _ in COLUMNS))


def print_trial(trial: Trial) -> None:
    mark = "✓" if trial.summary.meets_slo else "✗"
    print(f"{mark} {trial.label:<28}" + "".join(f"{cell:>10}" for cell in _cells(trial.summary)), flush=True)


def promise_text(slo: Slo) -> str:
    promised = [
        f"{name} within {bound:g} s" for name, bound in (("first token", slo.ttft_s), ("gaps", slo.itl_s)) if bound < math.inf
    ]
    return f"promise: {' and '.join(promised)} for {slo.share:.1%}" if promised else "no promise"


def prefixes_text(prefixes: Prefixes) -> str:
    return (
        f"prefixes that come again : one replica's cache : the pool's cache = {prefixes.ratio()}; a cache that forgets nothing would "
        f"find {prefixes.repeated:.1%} of all prompt tokens, one as large as the pool's {prefixes.ceiling:.1%}"
    )


def as_json(workload: Workload, slo: Slo, trials: Sequence[Trial], more: Mapping[str, object]) -> dict[str, Any]:
    promise = {name: value if math.isfinite(value) else None for name, value in asdict(slo).items()}
    runs = [{"label": trial.label, "plan": asdict(trial.plan), "summary": trial.summary.as_dict()} for trial in trials]
    return {"workload": {"name": workload.name, **workload.description}, "promise": promise, "trials": runs, **more}


def write_html(
    path: Path, title: str, workload: Workload, slo: Slo, trials: Sequence[Trial], shown: Sequence[Trial], text: str
) -> None:
    """One file that needs nothing else. `shown`: the runs whose curves are drawn. Raises ConfigError without matplotlib."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("", *(column for column, _ in COLUMNS)))
    rows = "".join(
        f"<tr class={'kept' if trial.summary.meets_slo else 'broken'}><th>{html.escape(trial.label)}</th>"
        + "".join(f"<td>{cell}</td>" for cell in _cells(trial.summary))
        + "</tr>"
        for trial in trials
    )
    about = ", ".join(f"{name} {value}" for name, value in workload.description.items())
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style>
<h1>{html.escape(title)}</h1><p>{html.escape(about)}</p><p>{html.escape(promise_text(slo))}</p>
<pre>{html.escape(text)}</pre><div class="wide"><table><tr>{head}</tr>{rows}</table></div>
<p class="note">Times in seconds. ITL: between two tokens of one request. cached: prompt tokens found in a cache.
busy: replica time within steps.</p>
<figure>{_figure(shown, slo)}</figure></html>
"""
    path.write_text(page, encoding="utf-8")


def _figure(trials: Sequence[Trial], slo: Slo) -> str:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "figure.svg"
        draw(_panels(trials, slo), file)
        svg = file.read_text(encoding="utf-8")
    begin, _, rest = svg[svg.index("<svg") :].partition("<metadata>")
    return begin + rest.partition("</metadata>")[2]


def _panels(trials: Sequence[Trial], slo: Slo) -> list[Panel]:
    def over_time(title: str, y: str, value: Any, *, steps: bool = False) -> Panel:
        lines = []
        for trial in trials:
            moments = trial.outcome.ledger.moments
            lines.append(Line(trial.label, [m.at_s for m in moments], [value(m) for m in moments], steps=steps))
        return Panel(title=title, x="seconds", y=y, lines=lines)

    def hits(moment: Moment) -> float | None:
        return 100 * moment.cached_tokens / moment.prompt_tokens if moment.prompt_tokens else None

    return [
        over_time("Replicas that serve", "replicas", lambda m: m.replicas, steps=True),
        over_time("Waiting in line", "requests", lambda m: m.waiting),
        over_time("Running", "requests", lambda m: m.running),
        over_time("Prompt tokens found cached, so far", "%", hits),
        _first_tokens(trials, slo),
        over_time("Refused, so far", "requests", lambda m: m.refused),
    ]


def _first_tokens(trials: Sequence[Trial], slo: Slo) -> Panel:
    lines: list[Line] = []
    for trial in trials:
        ttfts = trial.outcome.ttfts()
        if ttfts:
            at = [min(len(ttfts) - 1, round(n * (len(ttfts) - 1) / _POINTS)) for n in range(_POINTS + 1)]
            lines.append(Line(trial.label, [ttfts[n] for n in at], [100 * (n + 1) / len(ttfts) for n in at]))
    if slo.ttft_s < math.inf:
        lines.append(Line("promise", [slo.ttft_s, slo.ttft_s], [0.0, 100.0], dashed=True))
    return Panel(title="Time to first token", x="seconds", y="% of requests", lines=lines, log_x=True)


def _cells(summary: Summary) -> list[str]:
    return [_cell(name, getattr(summary, name)) for _, name in COLUMNS]


def _cell(name: str, value: float) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "-"
    if name in ("hit_rate", "utilisation", "slo_share"):
        return f"{value:.1%}"
    if name == "replica_s":
        return f"{value / 3600:.2f}"
    return f"{value:.3g}" if name.endswith("_s") and not name.endswith("per_s") else f"{value:.0f}"


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#0f172a}
h1{font-size:1.4rem}pre{background:#f1f5f9;padding:.8rem;white-space:pre-wrap}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}th,td{padding:.25rem .6rem;text-align:right;white-space:nowrap}
tr>th:first-child{text-align:left}tr+tr{border-top:1px solid #e2e8f0}.kept>th::before{content:"✓ ";color:#16a34a}
.broken>th::before{content:"✗ ";color:#dc2626}.note{color:#64748b;font-size:.85rem}figure{margin:1rem 0}svg{max-width:100%;height:auto}
"""
