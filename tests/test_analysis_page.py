"""The timeline and the page show what caches hold: token by token, and in a browser where there is one."""
import html
import json
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from tinykv.analysis import page, timeline
from tinykv.analysis.walk import Text
from tinykv.cache import KVCache
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig

T, BROWSER = 100, shutil.which("chromium") or shutil.which("chromium-browser")
SETTINGS = {"kivi": {"recent": 8, "group_size": 8}, "pfn": {"block": 16},
            "antkv": {"vq": "d4m16", "anchors": 3, "block": 16, "recent": 8, "choose": "always"},
            "kvsink": {"block": 16, "choose": "always", "emergence_layer": 0, "outlier_channel": 3}}


@pytest.fixture(scope="module")
def text():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(64, 32, 48, 2, 4, 2, 16, 256)).requires_grad_(False)
    marks = torch.zeros(1, T, dtype=torch.bool)
    marks[0, [0, 40]] = True
    return Text(model, torch.randint(0, 64, (1, T)), marks, 1, calibration=torch.randint(0, 64, (4, T)))


def with_methods(text, *names):
    return replace(text, methods={name: METHODS[name](text.model.config, **SETTINGS[name]) for name in names})


@torch.no_grad()
def fresh(text, method, n):
    """A cache that has read the first n tokens one by one. The method has been calibrated."""
    cache = KVCache(text.model, method)
    for token in text.windows[0, :n]:
        text.model(token[None, None], cache, logits=False)
    return cache


def expected_states(rows):
    """By the definition: older than n_coded, one of the kept positions, or neither; in KV head 0."""
    n = rows.n_coded + rows.recent.shape[2]
    kept = [] if rows.kept_positions is None else rows.kept_positions[0, 0].tolist()
    return "".join("k" if t in kept else "c" if t < rows.n_coded else "r" for t in range(n))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_timeline_is_what_a_cache_holds_at_any_time(text, name):
    text = with_methods(text, name)
    row, = timeline.measure(text)
    seen = set()
    for n in (3, 16, 17, 47, T):
        states = timeline.states_at(row["history"], n)
        assert states == expected_states(fresh(text, text.methods[name], n).layers[1].keys)
        seen |= set(states)
    assert seen == set("rc" if name == "kivi" else "rck")
    assert (row["tokens"], row["recent"], row["kept"]) == (T, states.count("r"), states.count("k"))


def test_the_picture_of_a_method_has_its_states(text):
    row, = timeline.measure(with_methods(text, "pfn"))
    panel, = timeline.draw_small(text, row).axes
    image = panel.images[0].get_array().filled(-1)
    for n in (1, 20, T):
        drawn = "".join("-rck"[int(x) + 1] for x in image[n - 1])
        assert drawn == timeline.states_at(row["history"], n).ljust(T, "-")
    assert len(timeline.draw(text, [row] * 4).axes) == 6


class Words:
    """A tokenizer whose words a page has to escape."""
    bos_id = 0

    def decode(ids):
        return "".join(f" <{i}>&" for i in ids)


@pytest.fixture(scope="module")
def written(text, tmp_path_factory):
    """A page of two methods: its path, its content, and the caches that it was made from."""
    path, text = tmp_path_factory.mktemp("page") / "cache.html", with_methods(text, "kivi", "pfn")
    content = page.write(path, text, Words, "small")
    return path, content, {name: fresh(text, method, T) for name, method in text.methods.items()}


def decimals(row):
    exponent, *numbers = row
    return [x * 10 ** exponent for x in numbers]


@torch.no_grad()
def test_the_page_has_what_is_read(text, written):
    path, content, caches = written
    assert content["tokens"] == ["<s>" if i == 0 else f" <{i}>&" for i in text.windows[0].tolist()]
    assert path.stat().st_size <= 500_000
    assert set(re.findall(r"https?://[^\"'\s]+", path.read_text())) == {"http://www.w3.org/2000/svg"}  # no address
    for name, cache in caches.items():
        for layer in range(2):
            for kind, held in (("k", cache.layers[layer].keys), ("v", cache.layers[layer].values)):
                for head in range(2):
                    rows, read = content["methods"][name]["rows"][layer][kind][head], held.read()[0, head].float()
                    for t in range(T):
                        near = 0.006 * read[t].abs().max().item()
                        assert decimals(rows["read"][t]) == pytest.approx(read[t].tolist(), abs=near)
                    packed = held.codes.packed[0, head]
                    assert rows["bytes"] == [bytes(row.tolist()).hex() for row in packed]
                    assert [len(codes) for codes in rows["codes"]] == [16] * held.n_coded
    # what is not quantized yet is exact, and what is coded is not
    rows = content["methods"]["kivi"]["rows"][1]["k"][0]
    assert rows["exact"][-1] == rows["read"][-1] and rows["exact"][0] != rows["read"][0]


@pytest.mark.parametrize("numbers, layers, heads", [(10 ** 6, [0, 1], [0, 1]), (20_000, [1], [0, 1]), (9, [1], [0])])
def test_a_page_that_is_too_large_has_fewer_layers_and_heads(text, monkeypatch, numbers, layers, heads):
    monkeypatch.setattr(page, "MOST", numbers)  # a layer and a head of one method have 6,400
    assert page.shown_of(text, 1, T) == (layers, heads)


SCRIPT = """<script type="module">
const $ = id => document.getElementById(id);
while (!$("text").children.length) await new Promise(done => setTimeout(done, 20));
const press = key => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const seen = { states: {}, numbers: {} };
for (const name of ["kivi", "pfn"]) {
  [...$("methods").children].find(button => button.textContent === name).click();
  for (const n of [10, 47, 100]) {
    $("time").value = n;
    $("time").dispatchEvent(new Event("input"));
    seen.states[name + n] = [...$("text").children].map(token => token.className);
  }
  for (const token of [2, 20, 99]) {
    $("text").children[token].click();
    seen.numbers[name + token] = [...$("numbers").rows[2].cells].slice(1).map(cell => Number(cell.textContent));
  }
}
press("n");
seen.selected = [...$("text").children].findIndex(token => token.classList.contains("selected"));
press("1");
press("ArrowLeft");
seen.title = $("title").textContent;
seen.bars = $("attention").querySelectorAll("rect").length;
const out = document.createElement("pre");
out.id = "seen";
out.textContent = JSON.stringify(seen);
document.body.append(out);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_the_page_in_a_browser(text, written, tmp_path):
    """It opens without an error; the slider colours what a fresh cache holds then; a click shows what is read."""
    path, content, caches = written
    driven = tmp_path / "driven.html"
    driven.write_text(path.read_text() + SCRIPT)
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=20000", "--enable-logging=stderr",
         "--dump-dom", f"file://{driven}"], capture_output=True, text=True, timeout=300)
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stdout[-2000:] + done.stderr
    seen = json.loads(html.unescape(found[1]))

    letters = {"recent": "r", "coded": "c", "kept": "k", "unread": "-"}
    for name, cache in caches.items():
        for n in (10, 47, T):
            states = expected_states(fresh(text, cache.method, n).layers[1].keys).ljust(T, "-")
            assert "".join(letters[classes.split()[1]] for classes in seen["states"][f"{name}{n}"]) == states
        read = cache.layers[1].keys.read()[0, 0].float()  # the shown layer, KV head 0
        for t in (2, 20, T - 1):
            near = 0.006 * read[t].abs().max().item()
            assert seen["numbers"][f"{name}{t}"] == pytest.approx(read[t].tolist(), abs=near)
    assert seen["selected"] == 0 and seen["bars"] == T  # the one after the last is the first
    states = expected_states(fresh(text, caches["kivi"].method, T - 1).layers[1].keys)
    assert seen["title"] == (f"kivi has read {T - 1} tokens: {states.count('c')} coded (0 of them kept), "
                             f"{states.count('r')} recent")
