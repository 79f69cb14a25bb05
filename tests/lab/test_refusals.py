"""Refusals: whatever is wrong ends in one line that names it.

A new refusal is a row here. It has a test of its own, where it belongs, if more than the line is looked at: what a
cache holds then, or which file is left.
"""
import copy
import math
import os
from dataclasses import replace
from pathlib import Path

import embedded_sinks
import pytest
import torch
import wrong_methods
from cases import VOCAB, D, L, d, model_of, tokens_of
from test_cli import SMALL, refused
from test_evaluate import Typed

import eval_ppl
import train_intact
from tinykv import UserError, hf
from tinykv.cache import PROTOCOLS, KVCache
from tinykv.calibrate import calibrate
from tinykv.codecs.affine import Affine
from tinykv.codecs.base import pack
from tinykv.evaluate import measure
from tinykv.hf import EMBEDDED
from tinykv.lab.analysis import __main__ as analysis
from tinykv.lab.analysis import page
from tinykv.lab.data import Windows, load_windows
from tinykv.lab.hf.save import save
from tinykv.lab.run.table import sum_of
from tinykv.lab.tables import MADE_WITH, restore_tables, tables_of
from tinykv.lab.weights import QUANTIZERS, quantize
from tinykv.methods.base import CodecMethod
from tinykv.methods.intactkv import IntactKV, Prefix
from tinykv.methods.registry import METHODS

ROOT = Path(__file__).parents[2]
WEIGHTS = f"{EMBEDDED}/model.safetensors"
WIDE = ["--context", "64", "--windows", "2"]
TRAINING = ["--context", "48", "--windows", "1", "--calib-windows", "1", "--samples", "2", "--accumulate", "2",
            "--tokens", "32", "--updates", "3"]
INTACT = ["--method", "intactkv", *WIDE]

# program, and words that every row has: rows of more words, and what the line names
COMMANDS = [
    (eval_ppl, SMALL, [
        ("--choose always", "--choose", "--prompt"), ("--prompt 32", "--prompt 32", "shorter than a window, 32"),
        (f"--method intactkv --prefix {ROOT}/docs/prompt.txt --prompt 9 --context 64", "the prefix", "tokens"),
        ("--method kivi --bits 4,4", "rtn bits=4; give each value only once"),
        ("--method kvsink --preserve 9 --threshold 0.5", "given preserve=9, threshold=0.5, and has preserve 0"),
        ("--plot x.png --json x.png", "--plot x.png: --json writes there, too"),
        ("--data empty.txt", "empty.txt holds no text"),
        ("--method kvsnik", "kvsnik", "did you mean kvsink?"), ("--metod rtn", "--metod", "did you mean --method?"),
        ("--contex=64", "--contex", "did you mean --context?"), ("--bits two --method rtn", "argument --bits"),
        (f"--method {ROOT}/eval_ppl.py", "eval_ppl.py:Class"),  # a file without its class
        ("--method nowhere.py", "no file nowhere.py"), ("--method nowhere.py:X", "no file nowhere.py"),
        ("--method pfn --preserve 65", "pfn keeps 65", "32"), ("--method rtn --preserve 5", "--preserve", "rtn"),
        ("--method rtn --bits 2,nan", "nan"), ("--method rtn --scheme token-static --group-size 5", "5", "8"),
        ("--method kvsink --emergence-layer 9 --outlier-channel 1", "9", "layers"), ("--model no/folder", "no/folder"),
        ("--method pfn --scheme channel-static,kvqant", "kvqant", "kvquant", "token-static"),
        ("--method kivi --scheme kvquant", "--scheme", "kivi"),  # rtn, beside it, takes one, which has no groups
        ("--method rtn --outliers 1", "--outliers", "rtn"),  # not a setting of its scheme
        ("--method pfn,kvsink --outliers 0,1 --scheme token-static", "--outliers", "pfn", "kvsink"),
        ("--context 2048", "2048", "128"), ("--calib-context 4096", "calib-context 4096 is longer"),
        ("--windows all", "all of tales are more than"), ("--method rtn --vs kvi", "--vs kvi"),
        ("--windows 1000000000", "1000000000 windows of"), ("--calib-windows 1000000000", "1000000000 windows of"),
        *((f"--{flag} 0", f"--{flag}", "0") for flag in ("windows", "calib-windows", "batch", "prompt", "draws")),
        ("--data nothing.txt", "nothing.txt", "tales"), ("--data line\nbreak.txt", "line\\nbreak"),
        (f"--method fp16 --data {'x' * 5000}", "xxx..."), (f"--method {ROOT}/eval_ppl.py:Nothing", "Nothing", "Method"),
        ("--model ~/no/folder", os.path.expanduser("~/no/folder")),
        ("--model x.gguf", "x.gguf is no folder", "transformers"), ("--bos nonne", "did you mean none?"),
        ("--device cuda:9", "cuda:9"), ("--device gpu", "'gpu'", "give cpu, cuda"), ("--version", "--version;"),
        ("--device meta", "'meta'"),
        ("--keep 5", "did you mean --preserve?"), ("--group 7", "mean --group-size?"), ("--text x", "mean --data?"),
        *((words, "mean --scheme?") for words in ("--kv-cache-dtype fp8", "--kv-cache-dtype=nvfp4", "-ctk q8_0")),
        ("--scheme fp8", "'fp8'", "token-dynamic"),
        ("pfn", "did you mean --method pfn?"), ("--method mine:Hundredth", "did you mean mine.py:Hundredth?"),
        ("--json no/such/folder/out.json --method fp16", "no/such/folder"),
        ("--plot loss.jpg", "loss.jpg", "ends in .png, .pdf, .svg"), ("--draws 1000000000", "2000000000 windows of")]),
    (eval_ppl, INTACT, [
        ("--weights rnt", "rnt", "rtn", "awq", "gptq", "omniquant"), ("--weights rtn,", "''", "rtn"),
        ("--weights rtn --w-bits 3,1", "2 to 8", "1"), ("--weights rtn --w-group-size 24", "24"),
        ("--w-bits 3", "--w-bits", "--weights"), ("--w-group-size 32", "--w-group-size", "--weights"),
        ("--prefix empty.txt", "empty.txt is empty"), ("--prefix nothing.txt", "nothing.txt"),
        ("--prefix nothing.safetensors", "nothing.safetensors"),
        (f"--prefix {WEIGHTS}", "model.safetensors"), ("--prefix boss", "boss"),
        (f"--prefix {ROOT}/README.md", "64"),  # longer than a window
        ("--prefix one.txt,two.txt", "prefix"),  # neither begins the other, and all methods read the same windows
        ("--scheme token-static", "scheme", "token-dynamic", "token-static")]),
    (train_intact, ["--out", "x.safetensors", *TRAINING], [
        ("--samples 2147483647", "windows of", "ask for fewer"),
        (f"--out {WEIGHTS}", "model.safetensors", "that this program wrote"),
        ("--out no/such/folder/x.safetensors", "no/such/folder"), ("--out prefix.bin", "prefix.bin"),
        ("--updates 0", "updates", "0"), ("--lr 0", "lr", "0"), ("--clip=-1", "clip", "-1"), ("--tokens 2", "2"),
        ("--tokens 2048", "2048", "128")]),
    (analysis, [*WIDE, "--calib-windows", "6"], [
        ("norms --context 100000", "--context"), ("nothing", "nothing"), ("norms --windows 0", "--windows"),
        ("norms --model no/folder", "no/folder"), ("norms --json no/such/folder/x.json", "no/such/folder"),
        ("norms --data no/file", "no/file"), ("norms --layer 6", "--layer 6"), ("norms page", "page"),
        ("norms --context 0", "--context")]),
    (page, WIDE, [("--text no/file --out x.html", "no/file")]),
    (embedded_sinks, [], [(f"--triggers={share}", "--triggers", share) for share in ("-0.1", "1.5", "nan")])]


@pytest.mark.parametrize("program, always, words, named", [
    pytest.param(program, always, words, named, id=f"{program.__name__} {words[:40]}")
    for program, always, rows in COMMANDS for words, *named in rows])
def test_a_command_refuses_in_one_line(run, one_layer, monkeypatch, tmp_path, program, always, words, named):
    """And writes nothing. It runs beside files that no prefix can be."""
    for name, text in (("one.txt", "Balo lives in"), ("two.txt", "Eastwick is far"), ("empty.txt", "\n")):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    model = [] if program is embedded_sinks else ["--model", one_layer]
    line = refused(lambda *words: run(program, *words), *model, *always, *words.split(" "))
    assert len(line) < 1000 and all(name in line for name in named), line
    assert set(tmp_path.iterdir()) == before


# method: rows of what the line names, and settings
METHODS_REFUSE = {
    "rtn": [("rope is one of", {"rope": "Post"}), ("block of RTN", {"block": -4}),
            ("sensitivity is one of", {"scheme": "kvquant", "sensitivity": "token"}),
            ("formula is one of", {"formula": "ofset"}), ("scheme is one of", {"scheme": "no"}),
            *(("bits", {"scheme": "token-dynamic", "v_bits": bits}) for bits in (0, 2.5, 9, -1, "4", math.nan)),
            *(("bits", {"scheme": "kvquant", "k_bits": bits}) for bits in (1.5, 9)),
            ("bits", {"scheme": "skvq", "k_bits": 2.5}),
            *(("group size", {"scheme": "token-dynamic", "group_size": size}) for size in (5, 0, -4)),
            ("group size", {"scheme": "channel-dynamic", "group_size": 0}),
            *(("group size", {"scheme": "skvq", "group_size": size}) for size in (24, 0, 2.5)),
            *(("outliers", {"scheme": "kvquant", "outliers": share}) for share in (50, -1)),
            ("q norm", {"scheme": "kvquant", "q_norm": 1}), ("reorder", {"scheme": "skvq", "reorder": 1}),
            ("clip is one of", {"scheme": "skvq", "clip": "ends"}),
            ("metadata is one of", {"scheme": "skvq", "metadata": "fp4"}),
            *(("alpha", {"scheme": "skvq", "alpha": alpha}) for alpha in (0.0, 1.1)),
            ("alpha", {"scheme": "skvq", "alpha": 0.9, "clip": "none"}),
            ("rotate", {"scheme": "oscar", "rotate": "no"}), ("group size", {"scheme": "oscar", "group_size": 5}),
            ("scale tokens", {"scheme": "oscar", "scale_tokens": True})],
    "pfn": [("preserve of PFN", {"preserve": 0.5})],
    "kvsink": [("preserve must be", {"preserve": 0}), ("choose is one of", {"choose": "once"}),
               *(("threshold is a share", {"threshold": share}) for share in (0, 1.1, math.nan)),
               *(("both the emergence layer and the outlier channel", {"emergence_layer": layer,
                                                                       "outlier_channel": channel})
                 for layer, channel in ((0, None), (None, 0), (L - 1, 0), (0, D), (-1, 0))),
               ("a block of 12 tokens", {"scheme": "channel-dynamic", "group_size": 8, "block": 12})],
    "kivi": [*(("recent of KIVI", {"recent": n}) for n in (-1, -5, 2.5)),
             *(("v block must be", {"v_block": n}) for n in (0, 1.5)), ("group size", {"group_size": "8"})],
    "ott": [("outlier num must be", {"outlier_num": -1}), ("select is one of", {"select": "any"}),
            *(("extra pool must be", {"extra_pool": n}) for n in (-1, 0.5))],
    "skvq": [("block of SKVQ", {"block": 0}), ("group size", {"group_size": 2.5})],
    "kvquant": [("preserve of KVQuant", {"preserve": -1})],
    "cq": [("recent of CQ", {"recent": -1}), ("sensitivity is one of", {"sensitivity": "any"}),
           *((f"a vector format is dNmM.*{vq}", {"vq": vq})
             for vq in ("d3m16", "d32m16", "d2m12", "d2m1", "d2m8192", "m16d2", "d0m16")),
           ("bits", {"bits": 3}), ("vq", {"vq": "d2m16", "bits": 2})],
    "antkv": [("recent of AnTKV", {"recent": -1}),
              *(("anchors", {"anchors": n}) for n in ("-1", "-1%", "101%", "many", "1.5", "%", "1/0%"))],
    "intactkv": [("scheme is one of", {"scheme": "token-static"})]}


@pytest.mark.parametrize("name, named, settings", [
    (name, *row) for name, rows in METHODS_REFUSE.items() for row in rows], ids=str)
def test_a_method_refuses_settings_also_in_python(name, named, settings):
    """In its constructor, or when a cache is made."""
    with pytest.raises(UserError, match=named):
        KVCache(model_of(1), METHODS[name](model_of(1).config, **settings))


MODEL, TOKENS = model_of(1), tokens_of(2, 48)
CONFIG = MODEL.config
WINDOWS = Windows(TOKENS, [[], []])


def fp16(**how):
    return KVCache(MODEL, METHODS["fp16"](CONFIG), **how)


def other(factor=1.2):
    """A model of the same config."""
    model = copy.deepcopy(MODEL)
    for weight in model.parameters():
        weight.data *= factor
    return model


def made(name, **settings):
    method = METHODS[name](CONFIG, **settings)
    calibrate(MODEL, method, TOKENS)
    return method


def go_on(cache, tokens=TOKENS[:, :1], meanwhile=lambda: None):
    """A text of two, and more of it."""
    MODEL(TOKENS, cache)
    meanwhile()
    MODEL(tokens, cache)


def meanwhile(method, edit):
    go_on(KVCache(MODEL, method), meanwhile=lambda: edit(method))


def model_edited_before_a_reset():
    method, model = made("rtn"), other(1)
    cache = KVCache(model, method)
    model.model["norm"].weight.data *= 2
    cache.reset()


def calibrated_on_three_bits(other):
    """Of the weights, which are no parameters then; used on another model."""
    model, method = quantize(MODEL, QUANTIZERS["rtn"](3)), METHODS["rtn"](CONFIG)
    calibrate(model, method, TOKENS)
    KVCache(model, method)
    KVCache(other, method)


def generated(tokens):
    """A text that goes on after `generate`; tokens: a function of its output."""
    cache = fp16()
    MODEL.generate(tokens(MODEL.generate(TOKENS, 3, cache)), 1, cache)


def in_a_model_of(positions):
    model = copy.deepcopy(MODEL)
    model.config.max_position_embeddings = positions
    cache = KVCache(model, METHODS["kivi"](model.config))
    for _ in range(9):
        model(TOKENS[:, :5], cache)


def autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        MODEL(TOKENS)


def keep(positions):
    rows = fp16().layers[0].keys
    rows.append(torch.zeros(1, 2, 3, d))
    rows.keep(torch.tensor(positions))


def edited(method, setting, value):
    """A method, after it was made; the bits are those of a codec."""
    setattr(method.codecs[0].k if setting == "bits" else method, setting, value)
    KVCache(MODEL, method)


def integers():
    """A codec that gives integers."""
    rows = fp16().layers[0].keys
    rows.append(torch.ones(1, 2, 3, d))
    rows.codec = Affine(2, d)
    rows.codec.decode = lambda codes: Affine.decode(rows.codec, codes).int()
    rows.quantize(2)
    rows.read()


def sharing():
    """All layers have the codecs of the first."""
    method = METHODS["rtn"](CONFIG)
    edited(method, "codecs", method.codecs[:1] * L)


def restored(edit):
    """What `edit` makes of a calibrated method's tables."""
    tables = tables_of(made("rtn"))
    edit(tables)
    restore_tables(made("rtn"), tables, MODEL)


def attending(word, n):
    """A `KVCache` computes no attention."""
    model = other()
    model.use_attention(word)
    model(TOKENS[:, :n], KVCache(model, METHODS["fp16"](CONFIG)))


def beside(method, windows):
    """Kivi on windows, compared with what a method did on WINDOWS."""
    measure(MODEL, METHODS["kivi"](CONFIG), windows, fp16=measure(MODEL, METHODS[method](CONFIG), WINDOWS))


def windows_edited():
    """In place, after fp16 was measured on them."""
    windows = Windows(TOKENS, [[], []])
    exact = measure(MODEL, METHODS["fp16"](CONFIG), windows)
    windows.tokens[:, 5:] = 7
    measure(MODEL, METHODS["kivi"](CONFIG), windows, fp16=exact)


def saved(edit):
    """The embedded model, after an edit."""
    model = hf.load_model(EMBEDDED)
    edit(model)
    save(model, EMBEDDED / "tokenizer.model", os.devnull)


def prefixed(edit):
    prefix = Prefix("two", [1, 5])
    prefix.fill(MODEL, MODEL)
    KVCache(MODEL, IntactKV(CONFIG, prefix))
    edit(prefix)
    return KVCache(MODEL, IntactKV(CONFIG, prefix)).method


def pruned():
    model = other()
    del model.model["layers"][-1]
    KVCache(model, METHODS["fp16"](model.config))


def own(**parts):
    """A method of a user's own reads WINDOWS."""
    measure(MODEL, type("Own", (CodecMethod,), parts)(CONFIG, scheme="token-dynamic"), WINDOWS)


def counts(method, layer_cache, n):
    method.asked += 1


def compare(**flags):
    eval_ppl.compare("rtn", hf.load(EMBEDDED), **flags)


READERS = [MODEL, lambda tokens: MODEL(tokens, fp16()), lambda tokens: MODEL.generate(tokens, 2),
           lambda tokens: calibrate(MODEL, METHODS["rtn"](CONFIG), tokens)]


@pytest.mark.parametrize("named, call", [
    *(("protocol is one of", lambda how=how: fp16(protocol=how)) for how in ("Paper", None)),
    *(("calibrate takes methods that are made", lambda what=what: calibrate(MODEL, what, TOKENS))
      for what in ("rtn", METHODS["rtn"], {METHODS["rtn"](CONFIG)}, (METHODS["rtn"],))),
    ("dtype is one of torch's", lambda: hf.load(EMBEDDED, dtype="float16")),
    ("is a path; got None", lambda: hf.load(None)),
    ("generate takes a cache", lambda: MODEL.generate(TOKENS, 2, "kivi")),
    *(("not what its config says", lambda edit=edit: saved(edit)) for edit in (
        lambda model: setattr(model.rope, "freq", model.rope.freq / 2),
        lambda model: setattr(model.model["norm"], "eps", 0.1),
        lambda model: model.model["layers"][1].register_forward_hook(print),
        lambda model: setattr(model.lm_head, "forward", print),
        lambda model: setattr(model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.clone())))),
    *(("a method that is made", lambda method=method: KVCache(MODEL, method)) for method in ("kivi", METHODS["kivi"])),
    ("this model has no BOS", lambda: IntactKV(replace(CONFIG, bos_token_id=None))),
    ("made for another config", lambda: KVCache(MODEL, METHODS["rtn"](model_of(2).config))),
    ("the cache was made for another model", lambda: other()(TOKENS, fp16())),
    *(("calibrated, or edited, after this text", lambda edit=edit: meanwhile(made("rtn", scheme="token-static"), edit))
      for edit in (lambda method: calibrate(MODEL, method, TOKENS[:1]), lambda method: setattr(method, "block", 5))),
    ("was calibrated on another model", model_edited_before_a_reset),
    *(("was calibrated on another model", lambda other=other: calibrated_on_three_bits(other))
      for other in (MODEL, quantize(MODEL, QUANTIZERS["rtn"](4)))),
    *((f"prompt must be a whole number of at least 1; got {n}", lambda n=n: fp16(prompt=n)) for n in (0, -1, 2.5)),
    *((f"the prompt, 4 tokens; it got {n}", lambda n=n, how=how: MODEL(TOKENS[:, :n], fp16(protocol=how, prompt=4)))
      for n in (3, 5) for how in PROTOCOLS),
    ("reads a text in one forward", lambda: go_on(fp16(protocol="paper"))),
    *((f"holds 2 texts, but tokens for {n} were given", lambda n=n: go_on(fp16(), TOKENS[:1].expand(n, -1)))
      for n in (1, 3)),
    *(("goes on with the last token that it gave", lambda part=part: generated(part))  # not all of it, nor without it
      for part in (lambda text: text, lambda text: (text[:, -1:] + 1) % VOCAB)),
    *((words, lambda read=read, tokens=tokens: read(tokens)) for read in READERS for tokens, words in [
        (TOKENS[0], r"ids \(B, T\)"), (TOKENS[None], r"ids \(B, T\)"), (TOKENS.float(), "float32"),
        (TOKENS.tolist(), "list"), (TOKENS.numpy(), "ndarray"), (TOKENS[:0], "Tensor"), (TOKENS[:, :0], "Tensor"),
        (TOKENS - VOCAB, "from 0 to 40"), (TOKENS + VOCAB, "from 0 to 40"), (TOKENS.repeat(1, 86), "4096 positions")]),
    ("45 tokens are more than the 44 positions", lambda: in_a_model_of(44)),
    ("torch.autocast", autocast), ("logits are not finite", lambda: other(math.nan).generate(TOKENS, 2)),
    ("integers .* torch.float32", lambda: keep([[[0.5]]])),
    ("integers .* torch.bool", lambda: keep([[[True, False, True]]])),  # a mask
    *(("with B = 1 and Hkv = 2", lambda positions=positions: keep(positions))
      for positions in ([0, 1], [[0, 1]], [[[[0]]]], [[[0], [1], [2]]])),
    ("from 0 to 3; these go from 1 to 4", lambda: pack(torch.tensor([1, 4]), 2)),
    *(("changed since it was calibrated", lambda setting=setting, value=value: edited(made("rtn"), setting, value))
      for setting, value in (("rope", "post"), ("bits", 3))),
    ("has to give floating-point", integers),
    *(("a codec, or a setting of one, has changed since it was calibrated", lambda codecs=codecs: edited(
        made("rtn"), "codecs", codecs(made("rtn").codecs))) for codecs in (list, lambda codecs: codecs[::-1])),
    (f"the model has {L - 1} layers, and its config says {L}", pruned),
    ("after this text had begun: asked;", lambda: own(asked=0, keep_keys=counts)),
    *((f"{n} times token 7 before BOS would be read", lambda n=n: MODEL.generate(torch.cat(
        [torch.full((1, n), 7), torch.tensor([[CONFIG.bos_token_id, 9]])], dim=1), 2)) for n in (1, 5)),
    ("max new tokens must be .* at least 0; got -5", lambda: MODEL.generate(TOKENS, -5)),
    *((named, lambda several=several: sum_of([
        measure(MODEL, METHODS[name](CONFIG, **settings), WINDOWS, *how) for name, settings, *how in several]))
      for named, several in (
        ("are of FP16.*, KIVI", [("fp16", {}), ("kivi", {})]),
        ("same settings.* of KIVI.*8-bit V", [("kivi", {"k_bits": 8, "v_bits": 8, "recent": n}) for n in (0, 4)]),
        ("same settings.* of KIVI.*8-bit V", [("kivi", {"k_bits": 8, "v_bits": 8, "group_size": n}) for n in (2, 4)]),
        ("protocol.* of FP16", [("fp16", {}, "paper"), ("fp16", {}, "stream")]))),
    ("measure takes Windows", lambda: measure(MODEL, METHODS["fp16"](CONFIG), TOKENS)),
    ("made for a model's config.*None", lambda: METHODS["kivi"](None)),
    ("scheme is one of.*'None'", lambda: METHODS["rtn"](CONFIG, scheme=None)),
    ("open_prefix\\('a.txt', tokenizer\\)", lambda: METHODS["intactkv"](CONFIG, prefix="a.txt")),
    ("got None for a tokenizer", lambda: eval_ppl.compare("rtn", (MODEL, None))),
    ("dtype is one of torch's.*torch.int8", lambda: hf.load(EMBEDDED, dtype=torch.int8)),
    ("README.md is not a whole tokenizer", lambda: save(hf.load_model(EMBEDDED), f"{ROOT}/README.md", os.devnull)),
    *((f"attention '{word}' reads the cache that computes it", lambda word=word, n=n: attending(word, n))
      for word, n in (("triton", 48), ("compiled", 1))),
    ("has no config; let its constructor call", lambda: edited(METHODS["rtn"](CONFIG), "config", None)),
    ("Forgets is given recent=4, and has recent 0", lambda: eval_ppl.compare(wrong_methods.Forgets, recent=4)),
    ("codecs of their own", sharing), ("Affine has no `bits`", lambda: edited(METHODS["kivi"](CONFIG), "bits", None)),
    ("found with other settings", lambda:  # of another method
     restore_tables(METHODS["rtn"](CONFIG), tables_of(made("pfn", preserve=0)), MODEL)),
    *(("found with other settings", lambda name=name, one=one, two=two:
       restore_tables(METHODS[name](CONFIG, **two), tables_of(made(name, **one)), MODEL)) for name, one, two in [
           ("rtn", {"k_bits": 2}, {"k_bits": 4}), ("rtn", {"scheme": "token-static"}, {"scheme": "channel-static"}),
           ("rtn", {"rope": "pre"}, {"rope": "post"}), ("pfn", {"preserve": 1}, {"preserve": 9}),
           ("kvsink", {"emergence_layer": 0, "outlier_channel": 1}, {"emergence_layer": 0, "outlier_channel": 2}),
           ("kvsink", {"threshold": 0.5}, {"threshold": 0.05}),
           ("skvq", {"group_size": 16}, {"group_size": 8}), ("cq", {"vq": "d4m8"}, {"vq": "d4m4"})]),
    *(("tables are missing, have other shapes", lambda edit=edit: restored(edit)) for edit in (
        lambda tables: tables.pop("1.k.zero"), lambda tables: tables.pop(MADE_WITH),
        lambda tables: tables.update({"1.k.scale": tables["1.k.scale"][..., :1]}))),  # which broadcasts
    *(("filled for other tokens, or another model", lambda edit=edit: prefixed(edit))
      for edit in (lambda prefix: prefix.fill(other(), other()), lambda prefix: prefix.ids.append(9))),
    *((f"of {what}", lambda method=method, windows=windows: beside(method, windows)) for what, method, windows in (
        ("another method", "kivi", WINDOWS), ("other windows", "fp16", Windows(TOKENS.flip(0), [[], []])),
        ("other windows", "fp16", Windows(TOKENS[:1], [[]])), ("other windows", "fp16", WINDOWS.predicted_from(9)))),
    ("of other windows", windows_edited),
    (r"give windows.predicted_from\(9\)", lambda: measure(MODEL, METHODS["fp16"](CONFIG), WINDOWS, prompt=9)),
    ("at a prefix are fp16's; give fp16=", lambda: measure(MODEL, prefixed(lambda prefix: None), WINDOWS)),
    ("axis is one of token, channel", lambda: Affine(2, 8, "channels")),
    ("formula is one of.*mean integer-zero?", lambda: Affine(2, 8, formula="integer_zero")),
    *(("the first target is from 1 to 47", lambda given=given: Windows(TOKENS, *given))
      for given in (([[(47, 49)], []], 1), ([[(-2, 3)], []], 1), ([[(9, 9)], []], 1), ([[]], 1), ([[], []], 0),
                    ([[], []], -5), ([[], []], 48))),
    *((f"batch must be a whole number of at least 1; got {n}", lambda n=n:
       measure(MODEL, METHODS["fp16"](CONFIG), WINDOWS, batch=n)) for n in (0, -1, 1.5)),
    ("did you mean test", lambda: load_windows("tales", None, 48, 2, "Test")),
    *((named, lambda name=name: load_windows(name, None, 48, 2, bos="none")) for name, named in (
        ("none.txt", "none.txt.*tales, fables, wikitext2, c4"), ("wikitext-2", "no data called 'wikitext-2'"),
        (EMBEDDED, "is no file"), (WEIGHTS, "cannot be read"), (f"{WEIGHTS}/below", "no such file"))),
    ("two rows are called PFN", lambda: eval_ppl.compare([METHODS["pfn"](CONFIG), METHODS["pfn"](CONFIG)])),
    ("no method 'kvsnk'.*mean kvsink?", lambda: eval_ppl.compare("kvsnk")),
    ("windows must be", lambda: load_windows("tales", None, 48, -1)),
    *(("is no folder", lambda name=name: hf.load(name))
      for name in ("/nowhere/at/all", "./no/model", "nowhere", "x" * 5000, "nul\0", __file__)),
    ("context must be", lambda: load_windows("tales", None, 0, 2)),
    ("did you mean replace", lambda: load_windows("tales", None, 48, 2, bos="Replace")),
    *((f"{name}: no effect here", lambda name=name, value=value: compare(**{name: value}))
      for name, value in (("method", "pfn"), ("list_methods", True), ("help", True), ("dtype", "bf16"),
                          ("device", "cpu"))),
    *((named, lambda name=name, value=value: eval_ppl.compare(Typed, hf.load(EMBEDDED), **{name: value}))
      for named, name, value in (("--first", "first", "no"), ("--block", "block", 1.5), ("--share", "share", "x"),
                                 ("--frist.*did you mean --first", "frist", True), ("--block", "block", True),
                                 ("--block", "block", False), ("--windows", "windows", 0),
                                 ("--windows", "windows", False), ("--bos", "bos", False))),
    *(("temperature is from 0 on, and top_p", lambda how=how: MODEL.generate(TOKENS, 2, **how))
      for how in ({"temperature": None}, {"temperature": -1.0}, {"temperature": math.nan},
                  {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "top_p": 90},
                  {"temperature": 1.0, "top_p": math.nan}))])
def test_python_refuses_in_one_line(named, call):
    with pytest.raises(UserError, match=named) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500
    assert caught.value._render_traceback_() == [f"UserError: {caught.value}"]  # which a notebook asks for
