"""The page of attention maps, in a browser: pickers, tokens that are followed, escapes."""

import json
import re
from itertools import pairwise

import pytest
import torch

from vanilla_transformer_tools.files import write_lines
from vanilla_transformer_tools.inspection.attention_maps import (
    AttentionMap,
    AttentionMaps,
    attention_page,
)

HEARD = ("<b>", "</script>", '"q"', "&amp;", "أنا", "</s>")
WRITTEN = ("中", "␣文", "</s>")


def maps(sums_to_one=True):
    """Sizes that differ: layers and heads of encoder and decoder, source and target."""
    generator = torch.Generator().manual_seed(0)

    def one(kind, rows, columns, layers, heads):
        weights = torch.randn(layers, heads, len(rows), len(columns), generator=generator)
        weights = weights if not sums_to_one else weights.softmax(-1)
        return AttentionMap(kind, rows, columns, weights, sums_to_one)

    return AttentionMaps(
        source="</script><b>",
        target="中 \u2028文",
        encoder=one("encoder", HEARD, HEARD, 1, 2),
        decoder=one("decoder", WRITTEN, ("<s>", *WRITTEN[:-1]), 3, 4),
        cross=one("cross", WRITTEN, HEARD, 3, 4),
    )


class Page:
    """What a reader does with the page, and sees on it."""

    def __init__(self, browser, path):
        self.browser = browser
        browser.get(path.as_uri())

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def texts(self, selector):
        return [found.get_attribute("textContent") for found in self.all(selector)]

    def pick(self, picker, value):
        self.all(f"#{picker} [data-value='{value}']")[0].click()

    def picked(self):
        buttons = self.all(".choices [aria-pressed=true]")
        return [one.get_attribute("data-value") for one in buttons]

    def numbers(self, script):
        """Weights that a script finds in the document."""
        return torch.tensor(self.browser.execute_script(f"return {script}"))

    def weights(self):
        return self.numbers(
            "[...document.querySelectorAll('tbody tr')].map("
            "row => [...row.querySelectorAll('td')].map(cell => +cell.dataset.weight))"
        )

    def token(self, line, index):
        return self.all(f"#{line} .token")[index]

    def shares(self, line):
        return self.numbers(
            f"[...document.querySelectorAll('#{line} .token')].map(one => +one.dataset.weight)"
        )


@pytest.fixture
def page(browser, tmp_path):
    def show(shown, **view):
        return Page(browser, write_lines(tmp_path / "page.html", [attention_page(shown, **view)]))

    return show


def close(found, expected):
    # Four digits.
    torch.testing.assert_close(found, expected, rtol=0, atol=1.01e-4)


def test_pickers_show_every_layer_and_head(page):
    shown = maps()
    opened = page(shown, kind="decoder", layer=3, head=4)
    assert opened.picked() == ["decoder", "3", "4"]
    # The choice stays where the kind has as many.
    opened.pick("kinds", "encoder")
    assert opened.picked() == ["encoder", "1", "mean"]
    opened = page(shown)

    assert opened.picked() == ["cross", "2", "mean"]
    close(opened.weights(), shown.cross.select(2))
    for kind, layer, head in [("decoder", 1, 2), ("encoder", 1, "mean")]:
        opened.pick("kinds", kind)
        opened.pick("layers", layer)
        opened.pick("heads", head)
        chosen = getattr(shown, kind)
        assert opened.picked() == [kind, str(layer), str(head)]
        number = None if head == "mean" else head
        close(opened.weights(), chosen.select(layer, number))
        assert opened.texts("#title") == [chosen.title(layer, number)]
        assert len(opened.all("#layers button")) == len(chosen.weights)
        assert len(opened.all("#heads button")) == 1 + chosen.weights.shape[1]


def test_tokens_are_the_text_they_are(page):
    opened = page(maps())

    assert opened.texts("#columns .token bdi") == opened.texts("thead span") == list(HEARD)
    assert opened.texts("#rows .token bdi") == list(WRITTEN)
    assert opened.texts("h1 bdi") == ["</script><b>", "中 \u2028文"]
    assert opened.all("b b, bdi *, script script") == []
    assert opened.browser.title.startswith("Attention: </script><b> → 中")


def test_token_is_followed_by_pointer_keyboard_and_click(page):
    from selenium.webdriver import ActionChains, Keys

    shown = maps()
    opened = page(shown, head=1)
    weights = shown.cross.select(2, 1)

    ActionChains(opened.browser).move_to_element(opened.token("rows", 1)).perform()
    close(opened.shares("columns"), weights[1])
    best = HEARD[int(weights[1].argmax())]
    assert opened.texts("#says")[0].startswith(f"␣文 looks at {best} {weights[1].max():.2f}, ")
    assert opened.texts("tr.followed th") == ["␣文"]

    opened.browser.execute_script("arguments[0].focus()", opened.token("columns", 4))
    close(opened.shares("rows"), weights[:, 4])

    opened.token("rows", 2).click()
    ActionChains(opened.browser).move_to_element(opened.token("rows", 0)).perform()
    close(opened.shares("columns"), weights[2])
    opened.pick("heads", 3)
    close(opened.shares("columns"), shown.cross.select(2, 3)[2])

    ActionChains(opened.browser).send_keys(Keys.ESCAPE).perform()
    assert opened.texts("#says") == [""]
    assert opened.all(".followed") == []


def test_right_to_left_text_runs_from_the_right(page):
    shown = maps()
    heard = ("أنا", "أحب", ".")
    cross = AttentionMap("cross", WRITTEN, heard, torch.rand(2, 1, 3, 3), True)
    opened = page(AttentionMaps("أنا أحب", "中", shown.encoder, shown.decoder, cross))

    places = [opened.token("columns", index).location["x"] for index in range(3)]
    assert all(left > right for left, right in pairwise(places))
    places = [opened.token("rows", index).location["x"] for index in range(3)]
    assert all(left < right for left, right in pairwise(places))


def test_labels_of_rows_stay_in_view_when_the_matrix_scrolls(page):
    opened = page(maps())
    narrow = "const box = document.querySelector('.matrix'); box.style.width = '9rem';"
    assert opened.browser.execute_script(f"{narrow} box.scrollLeft = 60; return box.scrollLeft") > 9
    assert opened.all("tbody th")[0].location["x"] > 0


def test_page_reaches_for_nothing_and_complains_of_nothing(page, browser):
    browser.get_log("browser"), browser.get_log("performance")
    opened = page(maps(sums_to_one=False))
    opened.pick("kinds", "decoder")

    assert opened.texts("#title small") == ["talking heads: rows need not sum to 1"]
    assert browser.get_log("browser") == []
    requests = json.dumps(browser.get_log("performance"))
    asked = re.findall(r'\\?"url\\?":\\?"((?:https?|wss?|ftp):[^"\\]*)', requests)
    assert asked == []


def test_page_is_whole_without_a_browser():
    text = attention_page(maps())

    assert text.count("</script>") == 2
    assert not re.search(r"https?:|//[a-z]|src=|@import|url\(", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert [one["kind"] for one in data["maps"]] == ["encoder", "decoder", "cross"]
    assert data["maps"][2]["rows"] == list(WRITTEN)
    assert data["maps"][2]["columns"] == list(HEARD)
    close(torch.tensor(data["maps"][2]["weights"]), maps().cross.weights)
    assert data["view"] == {"kind": "cross", "layer": 2, "head": "mean"}
