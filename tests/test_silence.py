"""Nothing wrong in silence: what is not finite, not of the right shape, or damaged ends in one line, never in a row."""
import copy
import math
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from cases import model_of, tokens_of
from safetensors.torch import load_file, save_file
from test_cli import refused

import eval_ppl
import train_intact
from tinykv import UserError, hf
from tinykv.cache import PROTOCOLS, KVCache, LayerCache
from tinykv.calibrate import calibrate
from tinykv.codecs.base import Codec, Codes, Pair
from tinykv.evaluate import measure, refuse_overflow
from tinykv.hf import EMBEDDED
from tinykv.lab.analysis import __main__ as analysis
from tinykv.lab.data import load_windows
from tinykv.lab.data.windows import Windows
from tinykv.lab.tables import Tables, fingerprint, restore_tables, save_tensors, tables_of
from tinykv.lab.weights import QUANTIZERS, quantize
from tinykv.methods.base import Method
from tinykv.methods.intactkv import exact_rows
from tinykv.methods.registry import METHODS
from tinykv.model import probe, same_model

TINY = ["--context", "48", "--windows", "1", "--calib-windows", "1"]
WINDOWS = Windows(torch.arange(64).view(2, 32), [[], []])


def damaged(folder, name, factor):
    """The embedded model with one weight times a factor, in a folder."""
    shutil.copytree(EMBEDDED, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name] *= factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


# ---- numbers that are not finite

VALUES = "model.layers.2.self_attn.v_proj.weight", 1e6  # beyond what 16 bits hold
RESIDUAL = "model.layers.3.mlp.down_proj.weight", 1e22  # its square is beyond fp32, and its norm 0


@pytest.mark.parametrize("protocol", ["paper", "stream"])
@pytest.mark.parametrize("weight, named", [(VALUES, "layer 2"), (RESIDUAL, "last layer")])
def test_a_model_that_overflows_is_refused(command, tmp_path, protocol, weight, named):
    folder = damaged(tmp_path / "model", *weight)
    line = refused(command, "--model", folder, "--method", "rtn", "--scheme", "token-dynamic", "--bits", "1",
                   "--protocol", protocol, "--json", tmp_path / "x.json", *TINY)
    assert named in line and "--dtype" in line and not (tmp_path / "x.json").exists()


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("part, n_coded", [("recent", 0), ("recent", 1), ("recent_scores", 0), ("kept_scores", 0)])
def test_what_a_cache_holds_has_to_be_finite(kind, part, n_coded):
    """Also where no query attends to it, and the states are finite; and sums of scores, each of which was finite."""
    layer = LayerCache(0, METHODS["fp16"](model_of(1).config), None, "stream", None)
    for rows in (layer.keys, layer.values):
        rows.append(torch.zeros(1, 2, 3, 4))
        rows.keep(torch.tensor([[[1]]]))
        rows.accumulate(torch.zeros(1, 2, 3), None)
        rows.kept_scores = torch.zeros(1, 2, 1)
    cache, states = SimpleNamespace(layers=[layer]), [torch.ones(1, 3, 8)]
    refuse_overflow(cache, states)
    rows = getattr(layer, kind)
    getattr(rows, part)[0, 1, 0] = torch.inf
    rows.quantize(n_coded)
    with pytest.raises(UserError, match="layer 0"):
        refuse_overflow(cache, states)


def test_the_analysis_refuses_it_too(run, tmp_path):
    folder = damaged(tmp_path / "model", *VALUES)
    status, _, err = run(analysis, "norms", "--model", folder, "--context", "48", "--windows", "1")
    assert status == 2 and "layer 2" in err


def test_so_does_a_prefix(tmp_path):
    model, _ = hf.load(damaged(tmp_path / "model", *VALUES))
    with pytest.raises(UserError, match="finite"):
        exact_rows(model, model, [1, 2])


@pytest.mark.parametrize("rate", ["inf", "nan", "1e30"])
def test_training_writes_no_nan(run, one_layer, tmp_path, rate):
    out = tmp_path / "trained.safetensors"
    status, _, err = run(train_intact, "--model", one_layer, "--out", out, "--lr", rate, "--updates", 3,
                         "--samples", 2, "--accumulate", 2, "--tokens", 32, *TINY)
    assert status == 2 and "--lr" in err and not out.exists()


@pytest.mark.parametrize("factor", [1e38, 1e5])
def test_logits_that_overflow_and_a_loss_beyond_the_exponential_are_no_result(factor):
    model, tokenizer = hf.load(EMBEDDED)
    windows = load_windows("tales", tokenizer, 32, 1)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * factor)
    with pytest.raises(UserError, match="perplexity"):
        measure(model, METHODS["fp16"](model.config), windows)


# ---- what a method gives

class Half(Codec):
    bits = 2

    def encode(self, x, ignore=None):
        return Codes(x.float())

    def decode(self, codes):
        return codes.packed


class Mine(Method):
    """Nothing is wrong with it, until one of its parts, or of its codecs', is replaced."""
    block = 8

    def __init__(self, config):
        super().__init__(config)
        self.codecs = [Pair(Half(), Half()) for _ in range(config.num_hidden_layers)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name, wrong, said", [
    ("block", "a", "block of Mine.*'a'"), ("block", None, "block of Mine"), ("recent", "x", "recent of Mine"),
    ("preserve", "x", "preserve of Mine"),
    *(("codecs", codecs, f"Mine: `codecs`.*{codecs}") for codecs in (None, "abcd", ())),
    ("encode", lambda x, ignore: None, "`encode` of Half.*None"),
    ("decode", lambda codes: codes.packed[:, :, :1], r"`decode` of Half.*\(1, 4, 1, 16\)"),
    ("decode", lambda codes: codes.packed[:, :, :8], r"`decode` of Half.*\(1, 4, 8, 16\)"),
    ("decode", lambda codes: codes.packed.long(), "`decode` of Half.*int64"),
    ("decode", lambda codes: codes.packed * math.nan, "layer 0, K.*not finite"),
    *(("keep_keys", lambda layer, n, t=t: torch.full((1, 1, 1), t), f"`keep_keys`.* {t},") for t in (10 ** 6, -2)),
    ("score", lambda layer, q, K: (K[..., 0], K[..., :1, 0]), r"`score` of Mine.*\(1, 4, 1\)"),
    ("score", lambda layer, q, K: (K[..., 0] * math.nan, K[..., 0]), "layer 0.*not finite")])
def test_what_a_method_gives_is_checked(protocol, name, wrong, said):
    model, windows = model_of(1), Windows(tokens_of(1, 32), [[]])
    method = Mine(model.config)
    for maker in [codec for *_, codec in method.each_codec()] if hasattr(Half, name) else [method]:
        setattr(maker, name, wrong)
    method.uses_scores = name == "score"
    with pytest.raises(UserError, match=said):
        measure(model, method, windows, protocol)


@pytest.mark.parametrize("name", ["json", "help", "context", "calib_windows", "method", "settings"])
def test_a_setting_that_is_called_as_a_flag_is_refused(name):
    exec(f"class Named(Mine):\n    def __init__(self, config, {name}=1): pass", globals(), made := {})
    with pytest.raises(UserError, match=f"called {name}"):
        eval_ppl.compare(made["Named"])


# ---- a model is known by what it computes

def exchange(model):
    layers = model.model["layers"]
    layers[1], layers[2] = layers[2], layers[1]


def louder(module, x, y):
    return 1.2 * y


def hook(model):
    """In the place of the last one, and at the same place in memory."""
    v_proj = model.model["layers"][1].self_attn.v_proj
    v_proj._forward_hooks.clear()
    v_proj.register_forward_hook(louder)


def slow(model):
    model.rope.freq = model.rope.freq / 1.1


def enlarge(model):
    for weight in model.parameters():
        weight.data *= 1.5


def soften(model):
    model.model["layers"][2].input_layernorm.eps *= 1e4


def overwrite(model):
    """One number; the sum of some of its neighbours may not have it."""
    with torch.no_grad():
        model.model["layers"][0].mlp.up_proj.weight[3, 5] += 1


def to(part, change):
    """An edit of the weight of a part, in place and behind torch's back."""
    return lambda model: change(model.get_submodule(part).weight.data)


permute = to("model.layers.1.self_attn.k_proj", lambda w: w.copy_(w.flip(0)))  # the same sum
def steer(model):
    """A buffer is no sign of quantized weights."""
    model.register_buffer("steering", torch.zeros(1))
    enlarge(model)


def part_of_the_vocabulary(model):
    """All rows of the embedding, but for those of the text by which a model is known; the head stays."""
    weight = model.model["embed_tokens"].weight.data
    model.lm_head.weight = torch.nn.Parameter(weight.clone())
    others = torch.ones(len(weight), dtype=torch.bool)
    others[probe(len(weight))] = False
    weight[others] = weight[others].roll(1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [
    steer, part_of_the_vocabulary, exchange, permute, hook, slow, enlarge, to("lm_head", lambda w: w.copy_(w.flip(0))),
    to("model.norm", lambda w: w.mul_(2)), to("model.layers.3.mlp.down_proj", torch.Tensor.zero_)])
def test_what_was_found_on_a_model_serves_no_other(tmp_path, change, dtype):
    """A method's tables, those of a folder, and fp16's result. But the model may have another dtype; and of which model
    quantized weights were is unknown."""
    (model, _), (edited, tokenizer) = (hf.load(EMBEDDED, dtype=of) for of in (torch.float32, dtype))
    method, fp16 = METHODS["rtn"](model.config), METHODS["fp16"](model.config)
    calibrate(model, method, WINDOWS.tokens)
    Tables(tmp_path, model).put("these", tables_of(method))
    exact = measure(model, fp16, WINDOWS)
    KVCache(edited, method)
    for same in (edited, quantize(edited, QUANTIZERS["rtn"](3))):
        measure(same, fp16, WINDOWS, fp16=exact)
    change(edited)
    for named, use in (("RTN.* was calibrated on another model", lambda: KVCache(edited, method)),
                       ("RTN.* was calibrated on another model", lambda: eval_ppl.compare(method, (edited, tokenizer))),
                       ("Result of fp16 is of another model", lambda: measure(edited, fp16, WINDOWS, fp16=exact))):
        with pytest.raises(UserError, match=named):
            use()
    change(model)  # its weights are as they were, or not: the folder has no tables of what it computes now
    assert Tables(tmp_path, model).get("these") is None


def later(model):
    """A hook that leaves the few tokens alone by which a model is known."""
    model.model["layers"][1].register_forward_hook(lambda _, given, out: out * (1 + (out.shape[1] > 4)))


def before(model):
    """A hook before the whole model, which its parts do not have."""
    model.register_forward_pre_hook(lambda _, given: (given[0].roll(1, 1), *given[1:]))


@pytest.mark.parametrize("change", [later, before])
def test_fp16s_result_is_of_the_model_with_its_hooks(change):
    model = hf.load_model(EMBEDDED)
    exact = measure(model, METHODS["fp16"](model.config), WINDOWS)
    change(model)
    with pytest.raises(UserError, match="of another model"):
        measure(model, METHODS["rtn"](model.config, scheme="token-dynamic"), WINDOWS, fp16=exact)


def test_bits_of_a_codec_that_was_edited_are_those_of_its_grid():
    model = hf.load_model(EMBEDDED)
    edited, other = (METHODS["kivi"](model.config, k_bits=b, v_bits=b, recent=8, group_size=8) for b in (2, 4))
    for *_, codec in edited.each_codec():
        codec.bits = 4
    assert measure(model, edited, WINDOWS).nll == measure(model, other, WINDOWS).nll


@pytest.mark.parametrize("protocol, keeps", [("paper", True), ("stream", False)])
def test_what_is_set_before_a_text_begins_counts(protocol, keeps):
    model, tokens = model_of(2), tokens_of(1, 24)
    rtn, pfn = (METHODS[name](model.config, scheme="token-dynamic") for name in ("rtn", "pfn"))
    edited = KVCache(model, rtn, protocol)
    edited.protocol, edited.method = "paper", pfn if keeps else rtn
    made = KVCache(model, edited.method, "paper")
    assert model(tokens, edited).equal(model(tokens, made)) and repr(edited) == repr(made)


def test_a_calibrated_method_is_not_edited_before_a_text_begins():
    model = model_of(2)
    pfn = METHODS["pfn"](model.config)
    calibrate(model, pfn, tokens_of(2, 32))
    cache = KVCache(model, pfn)
    pfn.rope = "post"
    with pytest.raises(UserError, match="has changed since it was calibrated"):
        model(tokens_of(1, 8), cache)


def test_a_token_that_was_trained_makes_another_model():
    """In the embedding and the head, which are one matrix here."""
    model = hf.load_model(EMBEDDED)
    exact = measure(model, METHODS["fp16"](model.config), WINDOWS)
    model.model["embed_tokens"].weight.data[17] *= 1.5
    with pytest.raises(UserError, match="of another model"):
        measure(model, METHODS["rtn"](model.config, scheme="token-dynamic"), WINDOWS, fp16=exact)


@pytest.mark.parametrize("change", [
    exchange, permute, hook, slow, enlarge, overwrite, soften,
    to("model.layers.1.self_attn.q_proj", lambda w: w[7].mul_(2)),  # a row
    to("model.layers.0.mlp.down_proj", lambda w: w[:, 90].mul_(2))])  # a column, of which it has more than rows
def test_a_model_that_was_edited_is_another(change):
    """And one that was not is the same, whatever its attention."""
    model = hf.load_model(EMBEDDED)
    known = model.identity()
    model.use_attention("plain")
    assert same_model(known, model.identity())
    change(model)
    assert not same_model(known, model.identity())


def test_a_file_of_tables_under_another_name_is_not_read(tmp_path):
    kept = Tables(tmp_path, model_of(1))
    for name in ("one", "other"):
        kept.put(name, {"0.k.scale": torch.ones(1)})
    assert kept.get("one")
    shutil.copy(kept.path("other"), kept.path("one"))
    assert kept.get("one") is None


def test_a_method_that_lost_its_tables_on_the_way_is_not_calibrated():
    """Given none; or interrupted while it takes others."""
    method = METHODS["rtn"](model_of(1).config)
    for tables, error in (({}, UserError), (Mock(keys=Mock(side_effect=KeyboardInterrupt)), KeyboardInterrupt)):
        calibrate(model_of(1), method, tokens_of(1, 32))
        with pytest.raises(error):
            restore_tables(method, tables, model_of(1))
        assert method.needs_calibration


def test_an_interrupted_probe_leaves_the_attention_as_it_was():
    model = hf.load_model(EMBEDDED)
    model.use_attention("plain")
    model.model["layers"][3].forward = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        model.identity()
    assert {layer.self_attn.attention for layer in model.model["layers"]} == {"plain"}


def test_a_prefix_is_trained_for_what_rope_turns_by():
    """But not for the last bit of it, which is another one on other machines."""
    model = copy.deepcopy(model_of(1))
    before = fingerprint(model)
    model.rope.freq = model.rope.freq * (1 + 2 ** -22)
    assert fingerprint(model) == before
    slow(model)
    assert fingerprint(model) != before


def test_tables_from_a_file_warn_of_few_vectors_a_centroid():
    method, other = (METHODS["cq"](model_of(1).config, vq="d4m64") for _ in range(2))
    calibrate(model_of(1), method, tokens_of(2, 100))
    restore_tables(other, tables_of(method), model_of(1))
    assert "few (below" in method.describe() and other.describe() == method.describe()


# ---- learned files

def test_equal_content_is_an_equal_file(tmp_path):
    tensors, notes = {"a": torch.arange(64.0), "b": torch.ones(3)}, {"format": "x", "names": "[]", "ids": "[1]"}
    save_tensors(tmp_path / "0", tensors, notes)
    save_tensors(tmp_path / "1", dict(reversed(tensors.items())), dict(reversed(notes.items())))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


def test_tables_are_of_the_quantized_weights_that_a_method_runs_on(one_layer, tmp_path):
    """GPTQ sees its own number of windows, then CQ's; what CQ learned on the first weights is not for the second."""
    def measured(n, folder):
        rows = eval_ppl.compare("cq", one_layer, vq="d8m2", weights="gptq", w_bits=2, context=32, windows=2,
                                calib_windows=n, calibration=folder)
        return rows[-1]["window_nll"]
    windows = METHODS["cq"](hf.load_config(one_layer), "d8m2").calibration_windows
    assert measured(None, tmp_path / "tables") != measured(windows, tmp_path / "tables") == measured(windows, None)
