"""The page shows what caches hold and what models then predict: its numbers, and in a browser where there is one."""
import base64
import functools
import gzip
import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tinykv import UserError
from tinykv.cache import KVCache
from tinykv.lab.analysis import page
from tinykv.lab.data.questions import Questions, read_questions
from tinykv.methods.registry import METHODS
from tinykv.model import Llama, LlamaConfig

T, BROWSER = 44, shutil.which("chromium") or shutil.which("chromium-browser")
LENGTHS, AT = [T, 39], {0: (30, 32), 1: (38, 39)}  # of two texts: tokens, and where their answers are
FEW = ("rtn", "rtn, a level at 0", "pfn", "kvsink", "kivi", "ott", "intactkv", "cq")
FEW = {name: page.SHOWN[name] for name in FEW}
FEW["kvsink"] = ("kvsink", {"emergence_layer": 0, "outlier_channel": 3})
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cache.html"


class Words:
    """A tokenizer whose words a page has to escape."""
    bos_id = 0

    def decode(ids):
        return "".join(f" <{i}>&" for i in ids)


def make_model(**changes):
    torch.manual_seed(0)
    return Llama(LlamaConfig(64, 32, 48, 2, 4, 2, 16, 256, **changes)).requires_grad_(False)


@pytest.fixture(scope="module")
def texts():
    """The model expects each answer's first token, and no other."""
    torch.manual_seed(1)
    tokens, model = torch.randint(1, 64, (2, T)), make_model(bos_token_id=0)
    tokens[:, 0] = 0
    for w, (start, end) in AT.items():
        for i in range(start, end):
            tokens[w, i] = (model(tokens[w:w + 1, :i])[0, -1].argmax() + (i > start)) % 64
    tokens[1, LENGTHS[1]:] = 5  # filling
    return Questions(tokens, LENGTHS, [[AT[0]], [AT[1]]])


@pytest.fixture(scope="module")
def calibration():
    torch.manual_seed(2)
    return torch.randint(0, 64, (6, T))


@pytest.fixture(scope="module")
def made(texts, calibration):
    """A model, the page's content and its methods; a random model has no sinks: two tokens are called so."""
    model = make_model(bos_token_id=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "SHOWN", FEW)
        patch.setattr(page, "find_sinks", lambda model, windows: torch.arange(windows.shape[1])[None] % 20 == 0)
        methods, refused = found = page.make_methods(model, calibration)
        patch.setattr(page, "make_methods", lambda *given: found)
        content = {"model": "small", **page.content(model, Words, texts, calibration)}
    assert not refused and all(m.block <= page.BLOCK for by_bits in methods.values() for m in by_bits.values())
    methods["fp16"] = {16: METHODS["fp16"](model.config)}
    return model, content, methods


@pytest.fixture(scope="module")
def one_by_one(made, texts):
    """A function of a method, its bits and a text: a cache that has read the text token by token, the logits after each
    of those, and the states of the page's keys each time."""
    model, content, methods = made

    @functools.cache
    @torch.no_grad()
    def read(label, bits, w):
        method, tokens = methods[label][bits], texts.tokens[w, :LENGTHS[w]]
        cache, found, states = KVCache(model, method), [], []
        for i in range(len(method.prefix.ids) if method.prefix else 0, len(tokens)):  # a prefix is there from the start
            chunk = tokens[None, i:i + 1] if found else tokens[None, :i + 1]
            found.append(model(chunk, cache)[0, -1])
            states.append(expected_states(cache.layers[content["layer"]].keys, content["head"]))
        return cache, torch.stack(found), states
    return read


def expected_states(rows, head):
    """By the definition: older than n_coded, one of the kept positions, or neither."""
    n = rows.n_coded + rows.recent.shape[2]
    kept = [] if rows.kept_positions is None else rows.kept_positions[0, min(head, rows.kept_positions.shape[1] - 1)]
    return "".join("k" if t in list(kept) else "c" if t < rows.n_coded else "r" for t in range(n))


def states_at(history, n):
    """The page's states when n tokens have been read."""
    return "".join([states for length, states in history if length <= n][-1:]).ljust(n, "r")


def decoded(content, run, kind):
    """The page's rows of a run: (T, channels), and the step between two numbers."""
    lo, hi, steps = content["bounds"][kind]
    numbers = [lo + (hi - lo) / steps * (ord(letter) - 0x100) for letter in content["runs"][run][kind]]
    return torch.tensor(numbers).view(content["channels"], -1).T, (hi - lo) / steps


def numbers_of(path):
    """What a page holds."""
    packed = re.search(r"H4sI[\w+/=]+", path.read_text())[0]  # gzip's first bytes, in base64
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.mark.parametrize("label, bits", [("fp16", 16), ("rtn", 2), ("kvsink", 3), ("kivi", 2), ("intactkv", 4)])
def test_a_run_is_what_a_cache_that_reads_token_by_token_holds_and_predicts(made, texts, one_by_one, label, bits):
    model, content, _ = made
    w = next(w for w, (start, _) in AT.items() if start == content["at"] + 1)  # the text that the page tells of
    tokens, run = texts.tokens[w, :LENGTHS[w]], content["runs"][f"{label} {bits}"]
    layer, head = content["layer"], content["head"]
    assert content["tokens"] == ["<s>", *(f" <{token}>&" for token in tokens[1:])]
    cache, logits, each = one_by_one(label, bits, w)
    assert len(each[-1]) == len(tokens) and all(states_at(run["history"], len(states)) == states for states in each)
    assert run["bytes"] == cache.nbytes
    for kind, rows in (("k", cache.layers[layer].keys), ("v", cache.layers[layer].values)):
        found, step = decoded(content, f"{label} {bits}", kind)
        assert (found - rows.read()[0, head].float()).abs().max() <= 0.51 * step
        for name in {"k": ("pre", "post"), "v": "v"}[kind] if label == "fp16" else ():  # to three digits of the largest
            exact = torch.tensor([[x * 10.0 ** e for x in row] for e, *row in content["exact"][name]])
            exact = model.rope.rotate(exact) if name == "pre" else exact
            assert ((exact - found).abs() < 0.006 * found.abs().amax(-1, keepdim=True) + step).all()
    # losses, likely tokens and the answer; a prefix's own predictions are those of 16 bits
    _, exact, _ = one_by_one("fp16", 16, w)
    p = torch.cat([exact[:len(tokens) - len(logits)], logits]).softmax(-1)
    assert run["loss"] == pytest.approx([-100 * math.log(p[i, t]) for i, t in enumerate(tokens[1:])], abs=0.6)
    assert run["p"] == [pytest.approx((1000 * row.sort(descending=True).values[:5]).tolist(), abs=0.6) for row in p]
    first = [content["pieces"][i] for i, *_ in run["top"]]
    assert first == [f" <{int(row.argmax())}>&" for row in p]
    assert run["writes"].startswith(first[content["at"]])
    assert content["answer"][0] == f" <{tokens[content['at'] + 1]}>&"
    assert run["answer"][0] == pytest.approx(p[content["at"], tokens[content["at"] + 1]].item(), abs=1e-4)


@pytest.mark.parametrize("label, bits", [("fp16", 16), ("rtn", 2), ("pfn", 3), ("kivi", 2)])
def test_what_happens_to_all_texts_ignores_their_filling(made, texts, one_by_one, label, bits):
    """An answer is right if all its tokens are."""
    nll, right = [], 0
    for w, (start, end) in AT.items():
        row = texts.tokens[w, :LENGTHS[w]]
        _, logits, _ = one_by_one(label, bits, w)
        nll.append(torch.nn.functional.cross_entropy(logits[:-1], row[1:], reduction="none"))
        right += all(logits[start - 1:end - 1].argmax(-1) == row[start:end])
    assert made[1]["all"][label][bits] == [pytest.approx(torch.cat(nll).mean().item(), abs=6e-4), right]
    assert right == 1 or bits < 16  # of two: the answer of one token


def test_levels_are_those_of_the_formula(made):
    _, content, methods = made
    for label in ("rtn", "rtn, a level at 0"):
        codec = methods[label][3].codecs[content["layer"]].v
        s, z = codec.scale[content["head"]].item(), codec.zero[content["head"]].item()
        expected = [s * q + z if label == "rtn" else s * (q - z) for q in range(8)]
        assert content["levels"][label][3] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kept, states", [([[0], [2]], ["kccr", "cckr"]), ([[1]], ["ckcr", "ckcr"])])
def test_the_states_of_a_head_are_its_own(kept, states):
    rows = SimpleNamespace(n_coded=3, recent=torch.zeros(1, 2, 1, 4), kept_positions=torch.tensor([kept]))
    assert [page.states_of(rows, head) for head in range(2)] == states


# Texts of a file, the command, and README's animation

class Letters:
    """A tokenizer of a token a word, with the blank before it."""
    bos_id = 1

    def encode_with_offsets(text):
        places = [match.span() for match in re.finditer(r"\s*\S+", text)]
        return [2 + len(text[a:b]) for a, b in places], places


def test_texts_of_a_file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("Who sings?\nIt is Mara\n\n\n a b\n")
    texts = read_questions(path, Letters, 192)
    assert texts.lengths == [6, 3] and texts.answers == [[(5, 6)], [(2, 3)]] and texts.tokens.shape == (2, 6)
    without_bos = SimpleNamespace(bos_id=None, encode_with_offsets=Letters.encode_with_offsets)
    for content, tokenizer, named in (("", Letters, "no text"), ("word", without_bos, "text 1"),
                                      ("a b\n\n" + "a " * 200, Letters, "text 2 has 201 tokens")):
        path.write_text(content)
        with pytest.raises(UserError, match=named):
            read_questions(path, tokenizer, 192)


@pytest.mark.parametrize("of_ones_own", [False, True])
def test_the_page_of_the_command(run, one_layer, tmp_path, monkeypatch, of_ones_own):
    """Of windows, or of texts of one's own."""
    monkeypatch.setattr(page, "SHOWN", {name: page.SHOWN[name] for name in ("rtn", "kvsink")})
    (tmp_path / "texts.txt").write_text("Once there was a baker. His name was Nob\n\nWho sings? The singer")
    words = ["--text", tmp_path / "texts.txt"] if of_ones_own else ["--context", 64, "--windows", 2]
    _, out, _ = run(page, "--model", one_layer, "--out", tmp_path / "cache.html", "--calib-windows", 2, *words)
    numbers = numbers_of(tmp_path / "cache.html")
    assert f"wrote {tmp_path / 'cache.html'}" in out and (tmp_path / "cache.html").stat().st_size < 600_000
    assert numbers["texts"] == 2 and numbers["model"].startswith("model")
    if of_ones_own:
        assert numbers["answers"] == 2 and "".join(numbers["tokens"][1:]).endswith(("was Nob", "The singer"))
    else:
        assert len(numbers["tokens"]) == 64


def test_readme_s_animation_shows_what_the_page_has():
    """An answer of 16 bits, lost in 3, is back with five kept tokens, two of which are sinks."""
    content = numbers_of(PAGE)
    assert [content["runs"][run]["writes"].split(".")[0] for run in ("fp16 16", "rtn 3", "kvsink 3")] == [
        " Juniper", ", and the horse of", " Juniper"]
    states = content["runs"]["kvsink 3"]["history"][-1][1]
    assert states.count("k") == 5 and [states[i] for i in content["sinks"]] == ["k", "k"]


# In a browser

DRIVER = """<script type="module">
while (!document.querySelector("#free svg circle")) await new Promise(done => setTimeout(done, 20));
const all = (host, what) => [...host.querySelectorAll(what)], free = document.getElementById("free");
const seen = { width: innerWidth, opened: free.textContent, steps: {}, at: [scrollY, location.hash] };
const press = key => document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const move = (range, value) => { range.value = value; range.oninput(); };
if (!location.search) {
  for (const section of all(document, "section")) {
    const range = section.querySelector("input"), title = section.querySelector("h2").textContent;
    const found = seen.steps[section.id] = { title, wide: 0, texts: [] };
    for (const button of [null, ...all(section, "button")]) {
      button?.click();
      for (const value of range ? [range.max, (Number(range.min) + Number(range.max)) / 2, range.min] : [0]) {
        if (range) move(range, value);
        found.wide = Math.max(found.wide, document.documentElement.scrollWidth - innerWidth);
        found.texts.push(section.textContent);
      }
    }
    for (const row of all(section, "tr")) found.texts.push(all(row, "th, td").map(x => x.textContent).join("|"));
  }
  const named = all(document, "[role=group], svg, canvas, #free .text [tabindex='0']");
  seen.names = named.map(x => x.ariaLabel ?? x.textContent);
  for (const text of ["kivi", "2 bits"]) all(free, "button").find(button => button.textContent === text).click();
  move(free.querySelector("input"), 17);
  const states = all(free, ".text span").map(token => token.className.split(" ")[1]);
  seen.free = [states, all(free, ".odds b")[5].textContent];
  scrollTo(0, 0);
  const before = location.hash;
  press("m");
  seen.ignored = location.hash === before;
  free.scrollIntoView();
  all(free, ".text span")[20].click();
  for (const key of ["n", "n", "p", "v", "b", "m", "ArrowRight", "ArrowLeft", "ArrowLeft"]) press(key);
  seen.hash = decodeURIComponent(location.hash);
}
parent.postMessage(seen, "*");
</script>"""
FRAMES = """<pre></pre><script>
const seen = [];
onmessage = event => {
  seen[Array.from(frames).indexOf(event.source)] = event.data;
  if (Object.keys(seen).length === frames.length) document.querySelector("pre").textContent = JSON.stringify(seen);
};
</script>"""
STEPS = ["cache", "levels", "broken", "sinks", "value", "keep", "zero", "own", "pool", "codebook", "bits", "free"]


@pytest.fixture(scope="module")
def lacking(calibration):
    """The content of a page without <s>, sinks and questions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "SHOWN", FEW)
        found = page.content(make_model(), Words, Questions(calibration[:2], [T, T], [[], []]), calibration)
    return {"model": "small", **found}


@pytest.fixture(scope="module")
def seen(made, lacking, tmp_path_factory):
    """What was seen in each frame: the page in two widths, at an address, where something is lacking. Fails for a
    message on the console."""
    if BROWSER is None:
        pytest.skip("needs chromium")
    folder, shown = tmp_path_factory.mktemp("page"), FRAMES
    for i, (content, address, width) in enumerate([
            (made[1], "", 400), (made[1], "", 1200), (made[1], "?opened#pfn;4;20;7;k", 1200), (lacking, "", 1200)]):
        path = folder / f"{i}.html"
        page.write(path, content)
        path.write_text(path.read_text() + DRIVER)
        shown += f'<iframe src="{i}.html{address}" style="border: 0; width: {width}px; height: 900px"></iframe>'
    (folder / "frame.html").write_text(shown)
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,900",
         f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000", "--enable-logging=stderr",
         "--dump-dom", f"file://{folder / 'frame.html'}"], capture_output=True, text=True, timeout=300)
    found = re.search(r"<pre>(.+?)</pre>", done.stdout, re.S)
    assert found and "CONSOLE" not in done.stderr, done.stdout[-2000:] + done.stderr
    return json.loads(html.unescape(found[1]))


def percent(p):
    """As the page writes a probability."""
    return f"{100 * p:.1f}%" if 0.995 < p < 1 else f"{math.floor(100 * p + 0.5)}%" if p >= 0.01 else "<1%"


@pytest.mark.parametrize("frame, width", [(0, 400), (1, 1200)])
def test_all_steps_in_a_browser(made, seen, frame, width):
    """Nothing is wider than the page; texts, states and chances are those of the content. Without a mouse or eyes:
    groups, pictures and the chosen token have a name, and a key does nothing where the playground is out of view."""
    _, content, _ = made
    seen = seen[frame]
    assert list(seen["steps"]) == STEPS and seen["width"] == width
    for i, (name, step) in enumerate(seen["steps"].items(), 1):
        assert step["wide"] <= 0, f"{name} is {step['wide']} pixels too wide"
        assert name == "free" or step["title"].startswith(f"{i}. ")
        assert not any(re.search(r"NaN|undefined|null|Infinity", text) for text in step["texts"]), name
    texts = {name: step["texts"] for name, step in seen["steps"].items()}
    T, bits = len(content["tokens"]), content["bits"]
    assert any(f"{T} tokens: {T * 2 * 2 * 2 * 16 * 2:,} bytes" in text for text in texts["cache"])
    for label in ("rtn", "pfn", "kvsink"):
        chance = percent(content["runs"][f"{label} {bits}"]["answer"][0])
        assert any(re.search(rf"(?<!\d){chance}", text) for text in texts["keep"])
    for name in STEPS[:-1]:  # the lines of the ladder, and the command that stops at one of them
        lines = (ROOT / content["code"][name]["file"]).read_text().splitlines()
        shown, stop = content["code"][name]["text"].splitlines(), lines[content["code"][name]["line"] - 1]
        assert stop.strip() in map(str.strip, shown) and not stop.strip().startswith(("def ", "#"))
        assert "\n".join(shown) in texts[name][0] and f"b {lines.index(stop) + 1}" in texts[name][0]
    for name, label in {"zero": "rtn, a level at 0", "own": "kivi", "pool": "ott", "codebook": "cq"}.items():
        loss, exact = (sum(content["runs"][run]["loss"]) / (T - 1) / 100 for run in (f"{label} {bits}", "fp16 16"))
        assert f"loses {loss - exact:.2f} nats".replace("-", "\u2212") in texts[name][0].replace("-", "\u2212"), name
    assert f"{content['runs'][f'ott {bits}']['history'][-1][1].count('k')} of {T} tokens kept" in texts["pool"][0]
    base = content["all"]["fp16"][16][0]
    for label in FEW:
        losses = [content["all"][label][b] for b in (4, 3, 2)]
        assert "|".join([label, *(f"{right}, +{max(0, loss - base):.2f}" for loss, right in losses)]) in texts["bits"]
    run, (classes, chance) = content["runs"]["kivi 2"], seen["free"]
    letters = {"recent": "r", "coded": "c", "kept": "k", "unread": "-"}
    assert "".join(letters[word] for word in classes) == states_at(run["history"], 17).ljust(T, "-")
    assert chance == percent(run["p"][16][0] / 1000)
    assert seen["hash"] == "#ott;4;16;21;v"
    assert len(seen["names"]) > 10 and all(seen["names"]) and seen["ignored"]


def test_a_page_opens_at_its_beginning_or_where_its_address_says(seen):
    opened, others = seen[2], seen[:2] + seen[3:]
    assert all(words in opened["opened"] for words in ("pfn at 4 bits has read", "The key of token 7"))
    assert opened["at"][0] > 0
    assert all(frame["at"] == [0, ""] and "kvsink at " in frame["opened"] for frame in others)


def test_what_a_model_or_a_text_lacks_loses_its_step_and_not_the_page(lacking, seen):
    """Without <s> intactkv is left out by name; without sinks and a question their steps are."""
    assert lacking["at"] is None and lacking["sinks"] == [] and "BOS" in lacking["refused"]["intactkv"]
    steps = seen[3]["steps"]
    assert list(steps) == [name for name in STEPS if name not in ("broken", "sinks", "value", "zero", "own")]
    assert "Left out: intactkv (this model has no BOS" in steps["bits"]["texts"][0]
    assert not any(re.search(r"NaN|undefined|null", text) for step in steps.values() for text in step["texts"])


def test_the_page_asks_the_network_for_nothing_and_writes_no_markup():
    text = PAGE.read_text()
    links = set(re.findall(r'<a href="([^"]*)"', text))  # which lead somewhere wherever the page lies
    assert links and all(link.startswith("https://arxiv.org/abs/") for link in links)
    assert set(re.findall(r"https?://[^\"'\s]+", text)) - links == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|<script[^>]* src|<link", text)
