"""Draws runs side by side as one HTML page that needs no other file. From a comparison to text."""

from __future__ import annotations

import time

from hpcstage.report.canvas import cleaned
from hpcstage.report.comparison import Comparison

PARTS = (
    "before the command",
    "compute",
    "waited for decoding",
    "waited for the source",
    "waited for local disk",
    "start and end",
)
TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>hpcstage: {{ runs|length }} runs compared</title>
<style>
:root { color-scheme: light dark; --rule: #8884; --soft: #888; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; } .wide { overflow-x: auto; }
th, td { padding: .2em .8em .2em 0; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child, .runs td, .runs th { text-align: left; } .runs td:last-child { white-space: normal; }
.ratio { color: var(--soft); } .unlike { border-left: .3em solid #c60; padding-left: 1em; }
.bar { display: flex; height: 1.2em; margin: .2em 0 .8em; } .bar span { min-width: 0; }
.key span { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em; vertical-align: -.1em; }
.p0 { background: #888; } .p1 { background: #4a7; } .p2 { background: #79c; }
.p3 { background: #d53; } .p4 { background: #e9a23b; } .p5 { background: #bbb; }
span { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
</style></head><body>
<h1>{{ runs|length }} runs compared</h1>
<div class="wide"><table class="runs">
<tr><th></th><th>run</th><th>job</th><th>mode</th><th>nodes</th><th>started</th><th>command</th></tr>
{% for run in runs -%}
<tr><th>{{ run.label }}</th><td>{{ run.id }}</td><td>{{ run.job_id or "" }}</td><td>{{ run.mode }}</td>
<td>{{ run.nodes }}</td><td>{{ started(run) }}</td><td><code>{{ run.command }}</code></td></tr>
{% endfor -%}
</table></div>
{% if unlike %}<div class="unlike"><strong>Not alike</strong><ul>
{% for told in unlike %}<li>{{ told }}</li>
{% endfor %}</ul></div>{% endif %}
{% if bars %}<h2>Where the time went</h2>
<p class="key">{% for part in parts %}<span class="p{{ loop.index0 }}"></span>{{ part }}{% endfor %}</p>
{% for bar in bars %}<div>{{ bar.label }}, {{ bar.total }}</div>
<div class="bar">{% for part in bar.parts -%}
<span class="p{{ loop.index0 }}" style="width: {{ part.percent }}%" title="{{ part.told }}"></span>
{%- endfor %}</div>
{% endfor %}{% endif %}
<h2>Figures</h2>
<div class="wide"><table>
<tr><th></th>{% for run in runs %}<th>{{ run.label }}</th>{% if loop.index0 %}<th></th>{% endif %}{% endfor %}</tr>
{% for row in rows -%}
<tr><td{% if row.name.startswith(" ") %} style="padding-left: 1.5em"{% endif %}>{{ row.name.strip() }}</td>
{%- for run in runs %}<td>{{ row.text(loop.index0) }}</td>
{%- if loop.index0 %}<td class="ratio">{{ row.ratio(loop.index0) }}</td>{% endif %}{% endfor %}</tr>
{% endfor -%}
</table></div>
<p>Behind each figure stands its ratio to that of {{ runs[0].label }}. {{ remark[0]|upper }}{{ remark[1:] }}.</p>
</body></html>
"""


def page(found: Comparison) -> str:
    """Returns the page. Names and commands may hold anything: they are escaped."""
    from jinja2 import Environment

    found = cleaned(found, unicode=True)
    template = Environment(autoescape=True).from_string(TEMPLATE)
    return template.render(
        runs=found.runs,
        rows=found.rows,
        unlike=found.unlike,
        remark=found.remark,
        parts=PARTS,
        bars=_bars(found),
        started=lambda run: time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_unix_s)),
    )


def _bars(found: Comparison) -> list[dict[str, object]]:
    """Returns the parts of the time of each run in percent of the longest; empty where no run has a time."""
    rows = {row.name.strip(): row for row in found.rows}
    totals = [float(value or 0) for value in rows["total"].values] if "total" in rows else []
    longest_s = max(totals, default=0.0)
    if not longest_s:
        return []
    bars: list[dict[str, object]] = []
    for at, run in enumerate(found.runs):
        parts = []
        for name in PARTS:
            value = rows[name].values[at] if name in rows else None
            width = 100 * float(value or 0) / longest_s
            told = f"{name}: {rows[name].text(at)}" if name in rows else ""
            parts.append({"percent": f"{width:.2f}", "told": told})
        bars.append({"label": run.label, "total": rows["total"].text(at), "parts": parts})
    return bars
