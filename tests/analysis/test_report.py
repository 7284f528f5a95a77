"""Pictures and page, the page in a real headless browser, and files that are never half-written."""

import base64
import copy
import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from spectral_fairseq.analysis import results_folder
from spectral_fairseq.analysis.options import Options
from spectral_fairseq.analysis.plots import OCCASIONAL, draw_all
from spectral_fairseq.analysis.report import as_html
from spectral_fairseq.analysis.results import analyse_model, document
from spectral_fairseq.analysis.results_folder import check_folder, write_results
from spectral_fairseq.analysis.selection import follows_one_run, spread
from spectral_fairseq.analysis.text import as_summary, as_text
from spectral_fairseq.errors import ConfigurationError, OutputError
from tests.checkpoints.made import cone, entries, save, save_dictionary, with_padding

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
HEADLESS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=5000",
)
SVG = "{http://www.w3.org/2000/svg}"
# A name that is markup would break the page if it were not escaped.
NASTY = '<b>&"run_1%'

# Runs in the page after it has loaded, and leaves what it saw in a <pre>.
PROBE = """
<script>
addEventListener("load", async () => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => { const [r, g, b] = parts(colour).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = element => { for (let e = element; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (parts(colour)[3] !== 0) return colour; } return "rgb(255,255,255)"; };
  let contrast = 99;
  for (const e of document.querySelectorAll("main *")) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const pair = [light(getComputedStyle(e).color), light(ground(e))].sort((a, b) => b - a);
    contrast = Math.min(contrast, (pair[0] + 0.05) / (pair[1] + 0.05));
  }
  const images = [...document.images];
  await Promise.all(images.map(i => i.decode().catch(() => 0)));
  const link = document.getElementById("download");
  const raw = new TextDecoder().decode(
    Uint8Array.from(atob(link.href.split(",")[1]), c => c.charCodeAt(0)));
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify({
    contrast,
    images: images.map(i => [i.naturalWidth, i.alt.length, i.currentSrc.length]),
    fetched: performance.getEntriesByType("resource").map(r => r.name)
      .filter(n => !n.startsWith("data:")),
    download: link.download, schema: JSON.parse(raw).schema,
    labels: JSON.parse(raw).checkpoints.map(c => c.label),
    heads: [...document.querySelectorAll("table")].map(
      t => [...t.querySelectorAll("thead th")].map(h => h.textContent)),
    hidden: [...document.querySelectorAll("main > .scroll td")].map(
      e => e.getBoundingClientRect()).filter(b => b.left < 0 || b.right > innerWidth).length,
    first: [...document.querySelectorAll("main > .scroll td")].map(e => e.dataset.label),
    headlines: document.querySelectorAll("header dd").length,
    spectrum: document.querySelector(".first img").getBoundingClientRect().bottom,
    size: parseFloat(getComputedStyle(document.querySelector("td")).fontSize),
    rows: document.querySelectorAll("tbody th[scope=row]").length,
    wide: document.documentElement.scrollWidth > innerWidth,
    stray: document.querySelectorAll("main b").length,
  });
  document.body.append(out);
});
</script>
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Four checkpoints of one run, one of which has everything a report can show."""
    folder = tmp_path_factory.mktemp("run")
    save_dictionary(folder / "dict.txt", 57)
    options = Options(words=("w3", "w5"), neighbours=3)
    analysed = []
    for epoch, kind in enumerate(("plain", "svd", "weight-norm", "plain"), 1):
        weight = with_padding(cone(spread=1 / epoch))
        path = save(
            folder / f"checkpoint{epoch}.pt",
            entries(weight, kind),
            updates=100 * epoch,
            model={"_name": "transformer_sc", "spectrum_prior": "exponential"},
        )
        label = NASTY if epoch == 2 else f"epoch {epoch}"
        analysed.append(analyse_model(path, options, label=label, dictionary=folder))
    one = analysed[0].result
    one["measures"].update(log_probability_rank=17.0, expected_pairwise_kl=1.5, bleu_1_recall=0.25)
    one["outputs"] = {
        "data": "bin",
        "subset": "valid",
        "tokens": 40,
        "words": 61,
        "threshold": 6e-7,
        "points": [1e-6, 1e-3, 1.0],
        "cumulative_share": [0.2, 0.6, 1.0],
        "layers": [
            {"mean_cosine": 0.1, "sequence_cosine": None, "isoscore": 0.5},
            {"mean_cosine": 0.3, "sequence_cosine": 0.4, "isoscore": 0.2},
        ],
    }
    one["nbest"] = {
        "file": "gen.txt",
        "sentences": 2,
        "hypotheses": {"least": 2, "most": 5},
        "references": 1,
        "signature": "nrefs:1|case:mixed",
    }
    return document("compare", analysed, options), analysed


@pytest.fixture(scope="module")
def pictures(results):
    return draw_all(*results)


def browse(page, tmp_path, *more):
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no browser: install chromium")
    profile = tmp_path / "profile"
    done = subprocess.run(
        [program, *HEADLESS, f"--user-data-dir={profile}", *more, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 390], ids=["wide", "phone"])
def test_the_page_in_a_browser(results, pictures, tmp_path, width):
    html = as_html(results[0], pictures)
    # The policy forbids scripts; the probe needs one.
    html = html.replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    page = tmp_path / "probed.html"
    page.write_text(html.replace("</body>", PROBE + "</body>"), "utf-8")
    text = browse(page, tmp_path, f"--window-size={width},900", "--dump-dom")
    found = re.search(r'<pre id="probe">(.*?)</pre>', text, re.DOTALL)
    assert found, text[-2000:]
    seen = json.loads(unescape(found.group(1)))
    assert seen["contrast"] >= 4.5  # WCAG AA
    assert seen["fetched"] == [] and seen["stray"] == 0
    assert len(seen["images"]) == len(pictures)
    for index, (width, alt, source) in enumerate(seen["images"]):
        data = pictures[index].file("svg")
        assert width > 100 and alt > 60
        assert source == len("data:image/svg+xml;base64,") + len(base64.b64encode(data))
    labels = [one["label"] for one in results[0]["checkpoints"]]
    assert seen["labels"] == labels and seen["heads"] == 2 * [["measure", *labels]]
    # The headline table shows every checkpoint without scrolling, on a phone too.
    assert seen["hidden"] == 0 and seen["first"] == 4 * labels and seen["size"] >= 16
    # The first screen has the headline of every model, and all of their spectra.
    assert seen["headlines"] == len(labels) and seen["spectrum"] <= 844
    assert seen["download"] == "analysis.json" and seen["schema"] == results[0]["schema"]
    assert seen["rows"] > 30 and not seen["wide"]


@pytest.mark.slow
def test_the_page_refers_to_nothing_outside(results, pictures):
    html = as_html(results[0], pictures)
    outside = [
        url
        for url in re.findall(r'(?:src|href|srcset|url)\s*[=(]\s*"?([^">)\s]+)', html)
        if not url.startswith(("data:", "#"))
    ]
    assert outside == [] and "<script" not in html and "default-src 'none'" in html
    raw = re.search(r'href="data:application/json;base64,([^"]+)"', html).group(1)
    assert json.loads(base64.b64decode(raw)) == results[0]
    for one in results[0]["checkpoints"]:
        assert one["sha256"] in html
    opening = html[: html.index("<details>")]
    assert opening.count("<figure") == 2 and opening.count('scope="row"') == 4
    assert "transformer_sc, 100 updates" in opening and "Two words have a mean cosine of" in opening
    first = opening[: opening.index("<figure")]  # the headlines have the figures that differ
    for one in results[0]["checkpoints"]:
        assert f": mean cosine {one['measures']['mean_cosine']:.2f}, effective rank" in first
    assert "nrefs:1|case:mixed" in html and "first 40 tokens" in html


def test_the_report_of_the_site_has_its_figures():
    """docs/generator/pages.py draws the page from this file."""
    path = Path(__file__).parents[2] / "docs" / "quickstart_report.json"
    if not path.exists():
        pytest.skip("the documents are not beside these tests")
    shipped = json.loads(path.read_text("utf-8"))
    assert [one["label"] for one in shipped["checkpoints"]] == ["plain", "spectrum control"]
    names = [picture.name for picture in draw_all(shipped)]
    assert "singular_values_absolute" in names and "projection" not in names


@pytest.mark.slow
def test_pictures_are_whole_and_say_what_they_show(results, pictures):
    names = [picture.name for picture in pictures]
    assert names == [
        "cosines",
        "singular_values_absolute",
        "singular_values",
        "projection",
        "norms_by_count",
        "log_probabilities",
        "layers",
        "history",
    ]
    for picture in pictures:
        assert picture.file("png").startswith(b"\x89PNG")
        xml.etree.ElementTree.fromstring(picture.file("svg"))
        assert re.search(r"\d", picture.alt)
    assert f"{results[0]['checkpoints'][0]['measures']['mean_cosine']:.3g}" in pictures[0].alt


def test_every_projection_has_a_scale_of_its_own(results):
    """A GPT-2 beside an array of long rows was a dot below the cross."""
    found, analysed = results
    scaled = [copy.deepcopy(one) for one in analysed[:2]]
    scaled[1].measured.projection.mul_(1e3)
    two = {**found, "checkpoints": found["checkpoints"][:2]}
    (picture,) = [one for one in draw_all(two, scaled) if one.name == "projection"]
    panels = [axes for axes in picture.figure().axes if axes.get_title()]
    for axes, one in zip(panels, scaled):
        reach = float(one.measured.projection.abs().max())
        assert axes.get_xlim()[1] == axes.get_ylim()[1] == pytest.approx(1.05 * reach)
    assert "scale of its own" in picture.alt


def of_one(results, **changed):
    """The document of the first checkpoint alone, with other entries."""
    first = copy.deepcopy(results[0]["checkpoints"][0])
    return {**results[0], "checkpoints": [{**first, **changed}]}


@pytest.mark.slow
def test_rounding_noise_is_zero_in_every_format(results):
    noisy = of_one(results)
    noisy["checkpoints"][0]["measures"].update(mean_cosine=-1.608e-05, mean_cosine_centred=1.2e-08)
    html = re.sub(r'href="data:[^"]*"', "", as_html(noisy, draw_all(noisy)[:2]))
    for text in (as_text(noisy), html):
        assert "e-05" not in text and "e-08" not in text
        assert not re.search(r"(?<![\w.])-0(?![.\d])", text)


@pytest.mark.slow
def test_names_are_drawn_as_they_are(results):
    import matplotlib

    found, labels = copy.deepcopy(results[0]), {"$x^{$", "$a$", "_hidden", r"a\$b"}
    for one, label in zip(found["checkpoints"], labels):
        one.update(label=label, outputs=found["checkpoints"][0]["outputs"])
    pictures = [one for one in draw_all(found, results[1]) if one.name != "history"]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        files = {picture.name: picture.file("svg") for picture in pictures}
    for name, file in files.items():
        root = xml.etree.ElementTree.fromstring(file)
        assert labels <= {"".join(x.itertext()).strip() for x in root.iter(f"{SVG}text")}, name


def test_history_needs_one_run(results):
    checkpoints = results[0]["checkpoints"]
    assert follows_one_run(checkpoints)
    assert not follows_one_run(checkpoints[:2])
    assert not follows_one_run(checkpoints[::-1])
    unknown = {**checkpoints[0], "progress": {"epoch": None, "updates": None}}
    assert not follows_one_run([unknown, *checkpoints[1:]])
    again = [{**one, "progress": {"epoch": 1, "updates": 100}} for one in checkpoints]
    assert not follows_one_run(again)  # one checkpoint under several names, say
    runs = [f"run{index}/checkpoint_best.pt" for index in range(4)]
    several = [{**one, "path": path} for one, path in zip(checkpoints, runs)]
    assert not follows_one_run(several)
    names = "plain", "svd", "weight-norm", "other"
    renamed = [{**one, "path": f"models/{name}.pt"} for one, name in zip(checkpoints, names)]
    assert not follows_one_run(renamed)
    steps = [{**one, "path": f"out/checkpoint-{index}"} for index, one in enumerate(checkpoints)]
    assert follows_one_run(steps)
    in_memory = [{**one, "path": None} for one in checkpoints]
    assert not follows_one_run(in_memory)


def test_many_checkpoints_are_drawn_in_part(results):
    found, analysed = results
    many = {**found, "checkpoints": found["checkpoints"] * 3}
    drawn = draw_all(many, list(analysed) * 3)
    assert "some of 12 checkpoints" in drawn[0].alt
    assert spread(list(range(12)), 7) == [0, 2, 4, 6, 7, 9, 11]
    assert spread([1, 2], 7) == [1, 2]


def test_text(results):
    text = as_text(results[0])
    (line,) = [line for line in text.splitlines() if line.startswith("I1 ")]
    values = [one["measures"]["i1"] for one in results[0]["checkpoints"]]
    assert line.split()[1:] == [f"{value:.4g}" for value in values]
    assert all(one["signature"] in text for one in results[0]["checkpoints"])
    assert "Neighbours of w3" in text


def test_a_random_table_stands_beside_the_figures(results):
    one = results[0]["checkpoints"][0]
    text = as_text(of_one(results))
    (line,) = [line for line in text.splitlines() if line.startswith("effective rank ")]
    values = (one["measures"]["effective_rank"], one["random"]["effective_rank"])
    assert line.split()[2:] == [f"{value:.4g}" for value in values]
    assert f"random {one['random']['effective_rank']:.3g}<" in as_html(results[0], [])
    # Beside several tables stands each value that random ones of their shapes have.
    several = copy.deepcopy(results[0])
    several["checkpoints"][1]["random"]["mean_share"] = 0.5
    (line,) = [x for x in as_summary(several).splitlines() if x.startswith("norm of the mean")]
    assert line.endswith(f" {one['random']['mean_share']:.4g} / 0.5")


def test_names_with_control_characters_stay_names(results):
    text = as_text(of_one(results, label="a\n\\input{evil}", signature="\x1b[2J"))
    assert "\x1b" not in text and "\\x1b[2J" in text


@pytest.mark.slow
def test_all_files_or_none(results, pictures, tmp_path, monkeypatch):
    out = tmp_path / "report"
    files = write_results(check_folder(out, False), results[0], pictures)
    assert sorted(files) == sorted(path.name for path in out.iterdir())
    assert len(files) == 2 * len(pictures) + 3
    assert json.loads((out / "analysis.json").read_text("utf-8")) == results[0]
    with pytest.raises(ConfigurationError, match="--overwrite"):
        check_folder(out, False)
    kept = (out / results_folder.PAGE).read_bytes()
    (out / "notes").write_text("mine")

    def fail(*unused):
        raise OSError("disk full")

    monkeypatch.setattr(results_folder, "as_html", fail)
    with pytest.raises(OSError):
        write_results(check_folder(out, True), results[0], pictures)
    with pytest.raises(OSError):
        write_results(check_folder(tmp_path / "new", False), results[0], pictures)
    monkeypatch.undo()
    monkeypatch.setattr(results_folder.Path, "write_bytes", fail)
    for name in ("new", "report"):
        with pytest.raises(OutputError, match="disk full"):
            write_results(check_folder(tmp_path / name, True), results[0], pictures)
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert (out / results_folder.PAGE).read_bytes() == kept
    assert (out / "notes").read_text() == "mine"


@pytest.mark.slow
def test_pictures_of_another_report_do_not_stay(results, pictures, tmp_path):
    out = tmp_path / "report"
    names = {picture.name for picture in pictures}
    assert names & {*OCCASIONAL} and len(names - {*OCCASIONAL}) == 3  # which every report has
    out.mkdir()
    (out / "history.png").touch()  # in a folder without a report it is the user's
    write_results(check_folder(out, True), results[0], pictures)
    assert (out / "history.png").exists()
    fewer = [picture for picture in pictures if picture.name != "layers"]
    files = write_results(check_folder(out, True), results[0], fewer)
    assert sorted(files) == sorted(path.name for path in out.iterdir())


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "file", tmp_path / "no" / "such"):
        with pytest.raises(ConfigurationError):
            check_folder(wrong, True)
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="a link to nothing"):
        check_folder(tmp_path / "link", True)


def test_a_folder_that_is_not_writable_is_refused_before_any_work(tmp_path, monkeypatch):
    # Not by its permissions, which do not bind a superuser.
    monkeypatch.setattr(results_folder.os, "access", lambda path, mode: path != tmp_path)
    for wrong in (tmp_path, tmp_path / "new"):
        with pytest.raises(ConfigurationError, match="which cannot"):
            check_folder(wrong, False)
    (tmp_path / "ours").mkdir()
    assert check_folder(tmp_path / "ours", False) == tmp_path / "ours"


@pytest.mark.slow
def test_the_folder_beside_is_not_written(results, pictures, tmp_path, monkeypatch):
    """It may lie on another disk, from which files cannot be moved, or forbid writing."""
    out = tmp_path / "mounted"
    out.mkdir()
    replace, opened = os.replace, os.open

    def within(*paths):
        assert all(out in Path(path).parents for path in paths)

    def open_within(path, flags, *more):
        if flags & os.O_CREAT:
            within(path)
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "replace", lambda a, b: (within(a, b), replace(a, b)))
    monkeypatch.setattr(os, "open", open_within)
    files = write_results(check_folder(out, False), results[0], pictures)
    assert sorted(files) == sorted(path.name for path in out.iterdir())
