"""The page: all of it in one file, nothing from outside, every word escaped, lines where the numbers are."""

import base64
import hashlib
import html
import itertools
import math
import re
from html.parser import HTMLParser

import pytest
from helpers.certificates import SHA, case_of, measured, steps_of, swept
from helpers.reports import EVIL, KEYID, REPORTS, failed, full, large, venv
from hypothesis import given
from hypothesis import strategies as st

from envbuild.certify.cases.coverage import Pair
from envbuild.certify.report.charts import (
    BOTTOM,
    HEIGHT,
    LEAST,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Scales,
    Series,
    ShadedBand,
    bytes_text,
    draw,
)
from envbuild.certify.report.curves import relative
from envbuild.certify.report.files import end_of, write_reports
from envbuild.certify.report.page import page_html

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Elements that are closed as they were opened, their attributes, and what a person reads."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words, self.style = [], [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            self.style += data
        else:
            self.words.append(data)

    def tagged(self, *tags):
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.fixture(params=REPORTS, scope="module")
def report(request):
    return REPORTS[request.param]()


@pytest.fixture(scope="module")
def page(report):
    return Page(page_html(report))


def test_page_needs_nothing_from_outside_and_runs_no_script(report, page):
    tags = {tag for tag, _ in page.elements}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base", "use", "image"})
    (policy,) = [meta["content"] for meta in page.tagged("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in page.style
    assert "@import" not in page.style
    for _, attributes in page.elements:
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")
        assert not {"src", "srcset", "action"} & set(attributes)


def test_every_link_leads_somewhere_and_ids_are_unique(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"][1:] for link in page.tagged("a")} <= set(ids)


def test_page_shows_the_verdict_what_it_is_about_and_every_case(report, page):
    words = " ".join(" ".join(page.words).split())
    assert words.index("Certified" if report.passed else "Not certified") < words.index("What it is about")
    for digest in (*report.digests.values(), report.lock_digest):
        assert digest in words
    assert len(page.tagged("details")) >= len(report.cases)
    for case in report.cases:
        assert case.id in words
        for problem in case.problems:
            assert problem.check in words
    signature = {True: f"Signed by key {KEYID}", False: "Not signed:"}[report.keyid is not None]
    assert (signature in words) is report.passed
    assert ("What is wrong" in words) is not report.passed


def test_markup_in_what_was_measured_is_text(report, page):
    text = page_html(report)
    assert "<script" not in text
    if report.measured.machine:
        assert html.escape(EVIL).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in text


def test_parts_of_a_matrix_are_named():
    words = " ".join(Page(page_html(large())).words)
    assert "a part of matrix" not in words
    words = " ".join(Page(page_html(venv())).words)
    assert "a part of matrix" in words
    assert "digit for digit" in words
    assert SHA["oci"] not in words


def paths(text):
    return re.findall(r'<path class="line ([a-z0-9-]+)" d="([^"]*)"', text)


def test_lines_are_drawn_and_end_where_numbers_do():
    drawn = paths(page_html(failed(cases=[case_of("gpt-fp32-baseline"), failed().cases[6]])))
    assert all(path.startswith("M") for _, path in drawn)
    # Three steps, the third with no loss: two points; the gradient norm has three.
    lengths = [path.count("L") + 1 for style, path in drawn if style.startswith("line-failed")]
    assert sorted(lengths)[:2] == [2, 2]
    assert 3 in lengths
    baseline = [path for style, path in drawn if style == "line-baseline"]
    assert {path.count("L") + 1 for path in baseline} == {8}


def overviews(text):
    """The charts of groups: the description of each, its legend and the styles of its lines."""
    before = text[: text.index('<details id="case-')]
    return [
        (re.search('aria-label="([^"]*)"', figure)[1], re.findall("</svg>([^<]+)</li>", figure), paths(figure))
        for figure in re.findall("<figure>.*?</figure>", before, flags=re.DOTALL)
    ]


def test_many_lines_are_a_band_and_the_worst_have_their_names():
    charts = overviews(page_html(full()))
    words, legend, lines = charts[0]
    words = html.unescape(words)
    assert legend == [
        "the other 49 cases: at most 1.2e-07",
        "pp2-resume2-in-tp2: at most 1.2e-07",
        "dp2-tp2-do-resume2-in-dp2: at most 1.2e-07",
    ]
    assert words.startswith("how far the loss of every step of 51 cases is from the baseline's, relative; ")
    assert words.endswith("; ".join([*legend[1:], legend[0], "band 1e-05"]))
    assert [style for style, _ in lines] == ["band", "line-0", "line-1"]
    # No chart has more lines than styles that differ.
    for _, _, lines in charts:
        styles = [style for style, _ in lines]
        assert len(styles) == len(set(styles)) <= 5


def test_each_baseline_has_a_chart_of_its_own():
    captions = re.findall("<figcaption>([^<]*)<", page_html(full()))
    assert captions[0] == "loss: relative difference from the baseline"
    assert {"loss, baseline", "loss, baseline-gb4"} <= set(captions)


def test_cases_that_failed_are_lines_of_their_own_however_many_there_are():
    bad = {"passed": False, "problems": [{"check": "parity-loss", "text": "x"}]}
    names = [f"gpt-fp32-dp{number}" for number in range(2, 12)]
    off = [case_of(name, steps=steps_of(loss=1 + index * 1e-3), **(bad if index % 2 else {}))
             for index, name in enumerate(names)]  # fmt: skip
    for words, legend, lines in overviews(page_html(failed(cases=[case_of("gpt-fp32-baseline"), *off])))[:1]:
        assert legend[1:] == ["dp11: at most 9.0e-03", "dp9: at most 7.0e-03"]
        assert legend[0] == "the other 8 cases: at most 8.0e-03"
        assert [style for style, _ in lines] == ["band", "line-failed-0", "line-failed-1"]
        assert "dp11: at most 9.0e-03" in words


def test_legend_names_steps_without_a_number():
    _, legend, _ = overviews(page_html(failed()))[0]
    assert "cp2: identical, no number at step 3" in legend
    assert "pp2-vp2: at most 1.0e-02" in legend


def test_shared_band_is_shown_once_and_others_with_each_case():
    text = page_html(full())
    assert '>loss <span class="band-text">(band 1e-05)</span>' in text
    wide = case_of("gpt-bf16-tp2", tolerance={"loss": 5e-4, "grad_norm": 1e-3, "weights": None},
                   largest_relative_difference={"loss": 0.0, "grad_norm": 2e-3, "weights": None})  # fmt: skip
    text = page_html(failed(cases=[case_of("gpt-bf16-baseline"), case_of("gpt-bf16-dp2"), wide]))
    assert "<td>2.5e-07 (band 1e-05)</td>" in text
    assert "<td>identical (band 0.0005)</td>" in text
    assert '<td class="over">2.0e-03 (band 0.001), over</td>' in text
    assert "identical of" not in text


def test_bandwidth_is_drawn_from_zero_with_the_floor():
    text = page_html(large())
    assert text.count("at least 300<") == 1
    assert "349.0" in text
    assert "at least" not in page_html(venv())


def test_network_is_a_table_by_nodes_with_what_drains_a_bad_one():
    drain = 'scontrol update NodeName=h3 State=DRAIN Reason="envbuild: fails"'
    lost = {"points": [], "failure": f"node 3 (h3) was lost: {EVIL}", "transports": None, "backend": None}
    sweeps = [swept([0, 1], 187.4), swept([2, 3], 1, **lost), swept([0, 1, 2], 160)]
    text = page_html(failed(measured=measured(network=sweeps), hosts={0: "h0", 1: "<b>"}, drain=[drain]))
    assert '<th scope="row">nodes 0 (h0) and 1 (&lt;b&gt;)</th><td data-label="over">NET/IB, P2P/CUMEM</td>' in text
    assert '<td data-label="all_gather, GB/s">187</td>' in text
    assert '<th scope="row">nodes 2 and 3</th><td data-label="over">-</td><td data-label="failed" colspan="3">' in text
    assert '<th scope="row">3 nodes</th>' in text
    assert "<code>scontrol update NodeName=h3 State=DRAIN Reason=&#34;envbuild: fails&#34;</code>" in text
    assert EVIL not in text
    assert "Network" not in page_html(failed())


def test_same_report_is_the_same_bytes(tmp_path, report):
    one, two = write_reports(tmp_path / "one", report), write_reports(tmp_path / "two", report)
    assert one.page.read_bytes() == two.page.read_bytes()
    assert one.junit.read_bytes() == two.junit.read_bytes()
    assert (one.page.name, one.junit.name) == ("report.html", "junit.xml")


def test_end_of_a_log_is_its_last_lines_whatever_is_in_it(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(100_000)))
    assert end_of(log).splitlines() == [f"line {number} \ufffd" for number in range(99_940, 100_000)]
    assert end_of(tmp_path / "none") == ""


# ---- charts

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e12, max_value=1e12)
POINTS = st.lists(st.tuples(st.integers(1, 500).map(float), st.none() | NUMBERS), min_size=1, max_size=30)


@given(POINTS, st.booleans(), st.booleans())
def test_whatever_the_numbers_are_lines_and_ticks_stay_within_the_chart(points, log_y, from_zero):
    chart = draw("title", [Series("a", points, "line-0")], Scales(log_y=log_y, from_zero=from_zero))
    drawable = [y for _, y in points if y is not None and (y >= 0 or not log_y)]
    assert (chart is None) is (not [y for y in drawable if y > LEAST or not log_y])
    if chart is None:
        return
    (line,) = chart.lines
    assert len(line.dots) == len(drawable)
    for x, y in line.dots:
        assert LEFT <= x <= WIDTH - RIGHT
        assert TOP <= y <= HEIGHT - BOTTOM
    assert chart.y_ticks
    for tick in chart.y_ticks:
        assert TOP <= tick.at <= HEIGHT - BOTTOM
    assert len({tick.text for tick in chart.y_ticks}) == len(chart.y_ticks)


def test_larger_is_higher_and_later_is_further_right():
    chart = draw("t", [Series("a", [(1, 5.0), (2, 3.0), (3, 4.0)], "line-0")], limit=(6.0, "allowed"))
    first, second, third = chart.lines[0].dots
    assert first[0] < second[0] < third[0]
    assert first[1] < third[1] < second[1]
    assert chart.limit.at < first[1]
    # On a power scale equal factors are equal distances.
    chart = draw("t", [Series("a", [(1, 1e-6), (2, 1e-4), (3, 1e-2)], "line-0")], Scales(log_y=True))
    heights = [y for _, y in chart.lines[0].dots]
    assert math.isclose(heights[0] - heights[1], heights[1] - heights[2], abs_tol=0.2)


def test_zero_is_the_lowest_place_of_a_power_scale():
    points = [(1, 1e-8), (2, 0.0), (3, 1e-7)]
    chart = draw("t", [Series("a", points, "line-0")], Scales(log_y=True))
    assert [tick.text for tick in chart.y_ticks] == ["0", "1e-8", "1e-7"]
    assert [y for _, y in chart.lines[0].dots] == [chart.y_ticks[1].at, chart.y_ticks[0].at, chart.y_ticks[2].at]
    assert chart.y_ticks[0].at == HEIGHT - BOTTOM > chart.y_ticks[1].at


def test_band_lies_between_the_least_and_the_largest():
    edges = [(1, 1.0, 3.0), (2, 2.0, 4.0), (3, None, None), (4, 1.0, 1.0)]
    chart = draw("t", [ShadedBand("b", edges), Series("a", [(1, 1.0), (2, 4.0)], "line-0")])
    band, line = chart.lines
    assert (band.path.count("M"), band.path.count("Z")) == (2, 2)
    first, second = line.dots
    assert [x for x, _ in band.dots[:4]] == [first[0], second[0], second[0], first[0]]
    # The largest there and the least back; a higher number is a smaller y.
    (_, top), (_, highest), (_, above), (_, bottom) = band.dots[:4]
    assert (highest, bottom) == (second[1], first[1])
    assert highest < top < above < bottom


@pytest.mark.parametrize("log_y", [True, False])
def test_numbers_that_no_scale_can_hold_are_gaps(log_y):
    numbers = [(1, 1.0), (2, 1e308), (3, float("inf")), (3.5, None), (4, 2.0), (5, 3.0)]
    band = ShadedBand("b", [(x, 1.0, y) for x, y in numbers])
    chart = draw("t", [band, Series("a", numbers, "line-0")], Scales(log_y=log_y))
    assert (chart.lines[0].path.count("Z"), chart.lines[1].path.count("M")) == (2, 2)
    # What has no neighbour is no line, and is a dot.
    assert (len(chart.lines[1].dots), chart.lines[1].lone) == (3, chart.lines[1].dots[:1])


def test_sizes_on_an_axis_leave_room_for_their_text():
    sizes = [1 << power for power in (16, 20, 24, 26, 30, 32)]
    chart = draw(
        "t", [Series("a", [(float(size), 1.0) for size in sizes], "line-0")], Scales(x_label="size", log_x=True)
    )
    places = [tick.at for tick in chart.x_ticks]
    assert (places[0], places[-1]) == (LEFT, WIDTH - RIGHT)
    assert len(places) > 2
    assert min(second - first for first, second in itertools.pairwise(places)) >= 60


def test_difference_is_unknown_without_a_number_and_from_zero():
    assert [relative(1.0, 0.0), relative(None, 1.0), relative(1.0, None), relative(0.0, 0.0)] == [None, None, None, 0.0]


@pytest.mark.parametrize(
    ("value", "text"), [(512, "512 B"), (65536, "64 KiB"), (1 << 30, "1 GiB"), (1 << 42, "4096 GiB")]
)
def test_sizes_are_shown_in_binary_units(value, text):
    assert bytes_text(value) == text


def test_grid_shows_which_pairs_of_axes_are_covered():
    pairs = (
        Pair(axes=("data", "tensor"), cases=("gpt-fp32-dp2-tp2",)),
        Pair(axes=("expert", "mamba"), why="a rule <b>"),
    )
    text = page_html(full().model_copy(update={"pairs": pairs}))
    # Once for each order of the two axes.
    assert text.count(': gpt-fp32-dp2-tp2">1</td>') == text.count(': a rule &lt;b&gt;">x</td>') == 2
    assert "pairs of axes: 1 covered, 1 impossible, 0 not covered" in text
    assert "Pairs of axes" not in page_html(full())
