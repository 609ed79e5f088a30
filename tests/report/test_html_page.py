"""The report as a web page: whole, harmless, readable on any window, and with the figures of the terminal's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import browser
from conftest import REPO, Hpcstage, python_command
from reportcases import CASES, announced, compose, manycases, node_part, run_part, shown

from hpcstage.record.compose import compose as composed
from hpcstage.record.index import Earlier
from hpcstage.record.parts.checkpoints import CheckpointsPart
from hpcstage.record.parts.elastic import ElasticPart, MembershipRow
from hpcstage.record.parts.outputs import OutputsPart
from hpcstage.record.parts.rows import ProcessPart, Sample
from hpcstage.record.schema import Record
from hpcstage.record.verdict import verdict_of
from hpcstage.report import figures
from hpcstage.report.html.page import render

LONG = "x" * 300
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)> \"'&{{7*7}} \u202eevil\r\n\x1b[31m שלום "
    + "x" * 300
)


def full(text: str = "") -> dict[str, Any]:
    """A record with every section that a page can have; `text` stands in all names."""
    drain = OutputsPart(directory=f"/out{text}", local_dir="/local", files=3, size_bytes=10**7, took_s=2.0)
    lost = replace(drain, undrained={"": 2})
    memberships = (
        MembershipRow(at_s=1, kind="start", hosts=("a", "b")),
        MembershipRow(at_s=30, kind="loss", hosts=("a",), lost=(f"b{text}",), silent_s=10, waited_s=1, first_step_s=3),
    )
    run = run_part(
        command=["python", f"train{text}.py"],
        config={"mode": "runtime", "local_dir": f"/local{text}", "budget": None, "data": [f"/d{text}"]},
        config_origin={
            "mode": "default",
            "local_dir": f"HPCSTAGE_LOCAL_DIR{text}",
            "budget": "default",
            "data": "--data",
        },
        drains={"out": lost, "checkpoint": drain},
        checkpoints=CheckpointsPart(protection=f"4+2{text}", saved_count=5, refused=(text,)),
        elastic=ElasticPart(generations=2, memberships=memberships, end=text),
    )
    samples = [
        Sample(float(n), 1.0, 10**7, 9, 1, 1, 1, 4.0, local_bytes=2 * 10**7, peer_bytes=10**6) for n in range(60)
    ]
    for at in range(9, 60, 10):
        samples[at] = replace(samples[at], loader_epochs=1, loader_wait_ns=10**9)
    times = {"loader_first_ns": 1, "loader_last_ns": 60 * 10**9}
    training = ProcessPart(7, 1, "native", {"loader_epochs": 6, "loader_steps": 60, "reads_measured": 1, **times})
    return compose(run, [node_part(samples=samples, order=announced(), processes=[training])])


WIDER_PX = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
PAGES: dict[str, Callable[[], dict[str, Any]]] = {
    **CASES,
    "full": full,
    "full and hostile": lambda: full(HOSTILE),
}


def page(name: str) -> str:
    return render(Record.from_json(PAGES[name]()))


class Parsed(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._is_style = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._is_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._is_style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._is_style else data


@pytest.mark.parametrize("name", PAGES)
def test_no_name_is_more_than_text(name: str) -> None:
    found = Parsed(page(name))
    tags = {tag for tag, _ in found.tags}
    assert tags.isdisjoint({"script", "img", "a", "link", "iframe", "object", "base", "form", "input"})
    attributes = {attribute for _, given in found.tags for attribute in given}
    assert not any(one.startswith("on") or one in ("src", "href") for one in attributes)
    assert all(char.isprintable() or char == "\n" for char in found.text)
    assert "49" not in found.text.partition("{{7*7}}")[0][-300:], "no template in a name is run"


def test_hostile_names_are_shown_as_they_are_but_for_what_is_not_printed() -> None:
    text = " ".join(Parsed(page("full and hostile")).text.split())
    assert text.count("</script><script>alert(1)</script><img src=x onerror=alert(1)>") > 5
    assert "\\u202eevil\\r\\n\\x1b[31m" in text


@pytest.mark.parametrize("name", PAGES)
def test_the_figures_are_those_of_the_terminal(name: str) -> None:
    record = Record.from_json(PAGES[name]())
    text, terminal = " ".join(Parsed(page(name)).text.split()), " ".join(shown(PAGES[name](), width=100).split())
    for sentence in figures.verdict(record):
        assert " ".join(figures.clean(sentence).split()) in text
    if not record.names_dataset or not record.run.was_watched:
        return
    told = [figures.seconds(value) for _, value in figures.times(record.time_split)] if record.time_split.wall_s else []
    told += [label for label, _, _ in figures.origins(record)]
    told += [figures.size(amount) for _, _, amount in figures.origins(record) if amount is not None]
    if record.contention.best_bytes_per_s:
        told.append(f"best {figures.rate(record.contention.best_bytes_per_s)}")
    for one in told:
        assert one in text, one
        assert one in terminal, one


def test_every_figure_says_how_to_read_it() -> None:
    """But for the notes, which are sentences."""
    sections = page("full").split("<section>")[1:]
    assert len(sections) >= 8
    for one in sections:
        assert 'class="how"' in one or "<h2>Notes</h2>" in one, one[:200]


def test_epochs_have_a_row_each() -> None:
    """The first begins with the first batch; those after the sixteenth are folded."""
    assert '>0</td><td class="r">9.1 s</td><td class="r">1 s</td>' in page("full")
    row = ("1", "10.1 s", "10 s", "1 s", "100 MB", "200 MB")
    assert "".join(f'<td class="r">{cell}</td>' for cell in row) in page("full")
    record = Record.from_json(full())
    many = replace(record, epochs=record.epochs * 5)
    assert "14 later epochs" in Parsed(render(many)).text
    assert "Epoch by epoch" not in render(replace(record, epochs=()))


def test_what_is_not_known_is_left_out() -> None:
    for name in ("no node", "python layer", "nothing attached"):
        assert Parsed(page(name)).text.count("not measured") <= 2, name


def test_earlier_times_stand_beside_it() -> None:
    record = composed(run_part(), [node_part()])
    judged = replace(record, verdict=verdict_of(record, [Earlier("direct", (100.0,))]))
    assert "mode direct 1m40s" in Parsed(render(judged)).text


@pytest.mark.slow
def test_512_nodes_with_a_million_samples_are_drawn_in_time() -> None:
    count, seconds = 512, 2000
    some = list(manycases.job(8, seconds))

    def nodes() -> Iterator[Any]:
        for index in range(count):
            yield replace(some[index % 8], host=f"node{index:04d}", node_index=index, node_count=count)

    record = composed(manycases.run(count), nodes())
    begin = time.process_time()
    drawn = render(record)
    assert time.process_time() - begin < 5
    assert len(drawn.encode()) < 2_000_000
    assert drawn.count('<td class="host">') == count


def test_a_real_browser_shows_it(tmp_path: Path) -> None:
    pictures = os.environ.get("HPCSTAGE_TEST_PICTURES")
    with browser(tmp_path / "profile") as chromium:
        for number, name in enumerate(PAGES):
            path = tmp_path / f"{number}.html"
            path.write_text(page(name), encoding="utf-8")
            for width in (360, 1400):
                for scheme in ("light", "dark"):
                    chromium.open(path, width, scheme)
                    assert chromium.value(WIDER_PX) <= 0, name
                    color = chromium.value("getComputedStyle(document.body).backgroundColor")
                    assert color == {"light": "rgb(249, 249, 247)", "dark": "rgb(13, 13, 13)"}[scheme]
                    if pictures:
                        chromium.picture(Path(pictures) / f"{name.replace(' ', '-')}-{width}-{scheme}.png")
            assert {url.rpartition("/")[2] for url in chromium.asked} == {path.name}, "it loads nothing"
            chromium.asked.clear()
        assert chromium.told == []


def test_the_command_writes_the_page_of_a_run(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    read = "import glob, sys; [open(name).read() for name in glob.glob(sys.argv[1] + '/*/*')]"
    data = make_tree()
    hpcstage("run", "--data", data, "--", *python_command(read, data))
    done = hpcstage("report", "--html", "page.html")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"written: page.html\n", b"")
    text = Parsed((hpcstage.cwd / "page.html").read_text()).text
    assert "Verdict" not in text
    assert "--data" in text, "where the setting came from"
    refused = hpcstage("report", "--html", "none/page.html")
    assert refused.returncode == 1
    (line,) = refused.stderr.decode().splitlines()
    assert line.startswith("hpcstage: cannot write ")
    assert line.endswith("page.html: No such file or directory (name another file with --html)")


def test_nothing_else_imports_the_templates() -> None:
    imported = "hpcstage.cli.report, hpcstage.cli.run, hpcstage.report.terminal.page"
    code = f"import sys, {imported}; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
