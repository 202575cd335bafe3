"""Pages in a real browser: nothing goes wrong, nothing is loaded, all can be read, on a phone and in the dark."""

from pathlib import Path

import pytest

import twellc
from tests.browsers import Browser, browser
from tests.twellc.reporting.pages import bench_result, decisions, profile, profile_of_experts, varied_layers
from tests.twellc.reporting.test_report import write

__all__ = ["browser"]

STACKS = ("encoder", "decoder")
LONG = [f"transformer.{stack}.block.{index}.layer.DenseReluDense" for stack in STACKS for index in range(15)]

# Elements that reach beyond the screen, unless they are in a box that scrolls by itself.
WIDE = """
const wide = element => element.getBoundingClientRect().right > window.innerWidth + 0.5;
const found = [...document.body.querySelectorAll("*")].filter(each => wide(each) && !each.closest(".scroll"));
return found.map(each => each.outerHTML.slice(0, 100));
"""
# The smallest contrast of a text with the paper behind it, as WCAG 2 defines it. A canvas knows all forms of a colour.
CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
const light = color => {
    canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map(part => part / 255);
    const [r, g, b] = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const paper = light(getComputedStyle(document.body).backgroundColor);
const texts = document.querySelectorAll("p, td, th, span, b, h1, h2, h3, figcaption, code, summary, svg text");
const own = [...texts].map(each => {
    const style = getComputedStyle(each);
    const ink = light(each.closest("svg") ? style.fill : style.color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
});
return [Math.min(...own), paper];
"""
# Labels of one figure that lie on each other, and the size of the smallest letters, in pixels.
LABELS = """
const clash = [];
let smallest = 99;
for (const plot of document.querySelectorAll("svg.plot")) {
    const texts = [...plot.querySelectorAll("text")].map(each => [each.textContent, each.getBoundingClientRect()]);
    const scale = plot.getBoundingClientRect().width / plot.viewBox.baseVal.width;
    for (const each of plot.querySelectorAll("text"))
        smallest = Math.min(smallest, scale * parseFloat(getComputedStyle(each).fontSize));
    for (const [i, [a, first]] of texts.entries()) for (const [b, second] of texts.slice(i + 1)) {
        const across = Math.min(first.right, second.right) - Math.max(first.left, second.left);
        const down = Math.min(first.bottom, second.bottom) - Math.max(first.top, second.top);
        if (across > 1 && down > 3) clash.push([a, b]);
    }
}
return [clash, smallest];
"""


@pytest.fixture(scope="module", params=["bytelm", "many blocks", "one block", "experts", "decisions alone"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bytelm: Path) -> Path:
    """Pages: of the trained example, as a user makes it; of thirty blocks, and of one; of experts; of decisions."""
    folder = tmp_path_factory.mktemp("pages")
    made = folder / "page.html"
    if request.param == "bytelm":
        text = folder / "code.py"
        text.write_text("".join(f"def f{number}(x):\n    return x + {number}\n\n" for number in range(200)))
        profiled = folder / "bytelm.profile"
        twellc.profile(bytelm, text, profiled, device="cpu", sequence=256)
        twellc.compile(bytelm, backend="none", onnx=folder / "m.onnx", firing_profile=profiled, html=made)
    elif request.param in ("many blocks", "one block"):
        modules = LONG if request.param == "many blocks" else LONG[:1]
        layers = {"layers": varied_layers(modules), "warnings": [f"layer {module} is odd" for module in modules]}
        decided = write(folder / "d.json", decisions(modules) | layers)
        bench = write(folder / "b.json", bench_result(modules) | layers)
        twellc.report(made, profile=profile(modules), decisions=decided, bench=bench)
    elif request.param == "experts":
        twellc.report(made, profile=profile_of_experts(layers=10, experts=128))
    else:
        twellc.report(made, decisions=write(folder / "d.json", decisions()))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_page(browser: Browser, page: Path, width: int, scheme: str) -> None:
    browser.open(page, width, scheme)
    # Hidden parts count, too.
    browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    said, asked = browser.logs()
    assert not said
    assert [each for each in asked if not each.startswith("data:")] == [page.as_uri()]
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(WIDE) == []
    contrast, paper = browser.run(CONTRAST)
    assert contrast >= 4.5 and (paper > 0.5) == (scheme == "light")
    clash, smallest = browser.run(LABELS)
    assert not clash and smallest >= 9
    browser.photograph(page.with_name(f"{width}-{scheme}.png"))
