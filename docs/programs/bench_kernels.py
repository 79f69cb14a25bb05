"""The Triton kernels without a cache around them: compiled, checked, and timed.

    python docs/programs/bench_kernels.py compile   every kernel for sm_80 and sm_90, without a GPU
    python docs/programs/bench_kernels.py check     every case's attention beside torch's, on this GPU
    python docs/programs/bench_kernels.py bench     time, bandwidth, tokens a second, on this GPU
"""
import itertools
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository

import kernels  # noqa: E402
from tinykv import UserError  # noqa: E402
from tinykv.lab import cli  # noqa: E402
from tinykv.lab.triton_cache import PackedRows, TritonCache, TritonLayer, anchor_scores, check_device  # noqa: E402
from tinykv.methods.registry import METHODS  # noqa: E402
from tinykv.model import Llama, LlamaConfig, Rope  # noqa: E402

SDPA = SDPBackend.FLASH_ATTENTION  # what the kernels are compared with
TOKEN = {"scheme": "token-dynamic"}
CASES = {  # name: (method, its settings)
    "fp16": ("fp16", {}),
    **{f"{bits:g}-bit per token": ("rtn", {"k_bits": bits, "v_bits": bits, **TOKEN})
       for bits in (8, 7, 6, 5, 4, 3, 2, 1.5, 1)},
    **{f"{bits}-bit kivi, groups of 128": ("kivi", {"k_bits": bits, "v_bits": bits, "group_size": 128})
       for bits in (4, 2)},
    "2-bit kivi, groups of 32": ("kivi", {}),
    "2-bit static, K before RoPE": ("rtn", {"scheme": "channel-static"}),
    "2-bit kvsink, 5 kept": ("kvsink", {"emergence_layer": 0, "outlier_channel": 0, **TOKEN}),
    **{f"{bits:g}-bit codebooks {vq}": ("cq", {"vq": vq})
       for vq, bits in (("d2m256", 4), ("d4m256", 2), ("d8m256", 1), ("d16m4096", 0.75))},
    "1-bit antkv, 1% kept": ("antkv", {"vq": "d8m256"}),
}
SHAPES = {  # L, D, MLP, H, Hkv, d, vocabulary, theta
    "LLaMA-3-8B": (32, 4096, 14336, 32, 8, 128, 128256, 500000.0),
    "LLaMA-2-7B": (32, 4096, 11008, 32, 32, 128, 32000, 10000.0),
}


# Caches full of random tokens

def config_of(shape, layers=None, positions=2 ** 20):  # KVSink needs two: it keeps nothing in the outlier's own
    L, D, mlp, H, Hkv, d, vocab, theta = SHAPES[shape]
    return LlamaConfig(vocab, D, mlp, layers or L, H, Hkv, d, positions, rope_theta=theta)


def method_of(name, config, device):
    """A method of CASES, with tables of random numbers where it would be calibrated: they cost the same to read."""
    kind, settings = CASES[name]
    method = METHODS[kind](config, **settings)
    heads, d = config.num_key_value_heads, config.head_dim
    for _, _, codec in method.each_codec():
        if "centroids" in codec.tables:
            codec.centroids = torch.randn(codec.slots, codec.m, codec.n, device=device).half()
        elif codec.needs_text:
            wide = torch.full((heads, d), 2.5, device=device)  # (Hkv, d)
            codec.set_range(-wide, wide)
    return method


def filled(layer, config, B, coded, device, dtype):
    """Put random tokens into a layer: `coded` of them (256, 512, 1024, ...) quantized, then the recent ones.

    As many as the method keeps are kept, evenly spread."""
    method, heads = layer.method, config.num_key_value_heads
    n = max(1, coded // 100) if method.keeps_share else method.preserve
    for rows in (layer.keys, layer.values):
        def random(T):
            return torch.randn(B, heads, T, config.head_dim, device=device).to(dtype)
        if n:
            positions = torch.arange(n, dtype=torch.int32, device=device) * (coded // n)  # (n)
            rows.kept_positions = positions.expand(B, heads if method.keeps_share else 1, n)
            rows.kept_rows = random(n)
        if method.uses_scores:
            rows.kept_scores = torch.zeros(B, heads, n, device=device)
            rows.recent_scores = torch.zeros(B, heads, method.recent + 1, device=device)
        codes = rows.codec.encode(random(256))
        while codes.packed.shape[2] < coded:
            codes = codes.followed_by(codes)
        rows.codes, rows.n_coded, rows.recent = codes, coded, random(method.recent + 1)
    layer.length, layer.dtype = coded + method.recent + 1, dtype
    return layer


def new_layer(name, config, B, coded, device, dtype):
    method, rope = method_of(name, config, device), Rope(config)
    rope.freq = rope.freq.to(device)  # (d/2)
    return filled(TritonLayer(0, method, rope, "stream", SimpleNamespace()), config, B, coded, device, dtype)


# Compile

class Pretend:
    """In the place of Triton's driver: kernels are compiled for `sm` and taken apart, and nothing is launched."""

    def __init__(self, sm):
        self.sm, self.utils, self.kernels = sm, self, []

    def get_current_target(self):
        return GPUTarget("cuda", self.sm, 32)

    def get_current_device(self):
        return self.sm  # what is compiled is kept by device

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return {"max_shared_mem": 166912 if self.sm == 80 else 232448}

    def launcher_cls(self, source, metadata):
        self.source, self.warps = source, metadata.num_warps
        return lambda *args: None

    def load_binary(self, name, cubin, shared, device):
        row = {"sm": self.sm, "kernel": name.removesuffix("_kernel"), "what": "", "each": None, "shared": shared,
               "warps": self.warps, **taken_apart(cubin)}
        if name == "attend_kernel":
            constants, names = self.source.constants, self.source.fn.arg_names
            fields = PackedRows._fields
            N, d, planes = constants[names.index("N"),], *(
                constants[names.index("k"), fields.index(x)].value for x in ("width", "planes"))
            decoder = fields.index("grid"), fields.index("books")  # None of 16-bit rows
            if all((names.index(side), field) in constants for side in "kv" for field in decoder):
                row["what"] = "16-bit rows" + ", K before RoPE" * (len(planes) == 2)
                row["what"] += ", kept" * ((names.index("kept"), 1) not in constants)
            row["each"] = row["loop"] * 32 * self.warps / (2 * N * d)
        self.kernels.append(row)
        return None, None, 0, 0, 1024


def taken_apart(cubin):
    """Registers of a thread, instructions that spill them, and the instructions of the longest loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia
        usage = subprocess.check_output([tool.cuobjdump.path, "-res-usage", file.name], text=True)
        sass = subprocess.check_output([tool.nvdisasm.path, "-c", file.name], text=True, stderr=subprocess.DEVNULL)
    code, labels, loop, spills = 0, {}, 0, 0
    for line in sass.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = code
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)(.*)", line):
            code += 1
            spills += found[1] in ("STL", "LDL")
            back = re.search(r"\(?(\.L_\w+)\)?", found[2]) if found[1] == "BRA" else None
            if back and back[1] in labels:
                loop = max(loop, code - labels[back[1]])
    return {"registers": int(re.search(r"REG:(\d+)", usage)[1]), "spills": spills, "loop": loop}


# as others are
UNCOMPILED = ("4-bit kivi, groups of 128", "2-bit codebooks d4m256", "0.75-bit codebooks d16m4096")


def compiled(job):
    """(sm, case, d, query heads a KV head, queries) -> a row for each kernel that this starts, in bf16."""
    sm, name, d, R, T = job
    torch.set_num_threads(1)
    driver.set_active(Pretend(sm))
    config = LlamaConfig(9, 8, 8, 2, 8 * R, 8, d, 2 ** 20, rope_theta=500000.0)
    layer = new_layer(name, config, 1, 256, "cpu", torch.bfloat16)
    q = torch.randn(1, config.num_attention_heads, T, d).to(torch.bfloat16)
    layer.attended(q)
    if name == "fp16":
        k = layer.keys.recent
        anchor_scores(q, 256, torch.zeros(q.shape[:3]), k, torch.zeros(k.shape[:3], dtype=torch.int32))
        kernels.topk(torch.zeros(1, 2048, 4096, dtype=torch.bfloat16)[..., 7], 5)
    for row in driver.active.kernels:
        row.update(d=d, R=R, T=T)
        if row["kernel"] == "attend" and not row["what"]:
            row["what"] = name
    return driver.active.kernels


def jobs_of(quick):
    """The cases that are compiled: all of them at LLaMA-3-8B's shape, and those with planes at other shapes, too."""
    names = [name for name in CASES if name not in UNCOMPILED]
    if quick:
        names = ["fp16", "2-bit per token", "1-bit codebooks d8m256"]
    jobs = [(sm, name, 128, 4, T) for sm in (90, 80) for name in names for T in (1, 128)]
    if quick:
        return jobs + [(90, "2-bit per token", 80, 4, 1)]
    others = ("fp16", "4-bit per token", "2-bit per token", "1-bit per token", "2-bit kivi, groups of 32",
              "2-bit static, K before RoPE")
    return jobs + [(90, name, d, R, 1) for d, R in ((64, 4), (80, 4), (128, 1), (128, 8)) for name in others
                   if (name, d) != ("2-bit kivi, groups of 32", 80)]  # 32 divides no 80


def compile_all(quick):
    """Every kernel at its settings through ptxas, and a table. UserError if one spills."""
    jobs = jobs_of(quick)
    with ProcessPoolExecutor() as pool:
        found = tqdm(pool.map(compiled, jobs), total=len(jobs), disable=None, leave=False, unit="case")
        rows = list(itertools.chain.from_iterable(found))
    key = ("sm", "d", "R", "T", "kernel", "what")
    rows = list({tuple(row[x] for x in key): row for row in rows}.values())  # each once
    rows.sort(key=lambda row: (-row["sm"], -row["d"], row["R"] != 4, row["R"], row["T"], row["kernel"]))
    print("bf16. R: query heads a KV head, T: new tokens. instr.: a thread's instructions for each number of K and V\n")
    lines = [[row["kernel"], row["what"], f"sm_{row['sm']}",
              *(str(row[x]) for x in ("d", "R", "T", "warps", "registers", "spills")),
              f"{row['shared'] / 1024:.1f}", cli.figure(row["each"], ".1f")] for row in rows]
    print(cli.Columns("kernel case GPU d R T warps regs spills KB instr.".split(), lines, left=2))
    if any(row["spills"] for row in rows):
        raise UserError("a kernel spills registers")


# Check

def off_by(name, config, T, device, dtype):
    """How far the attention of T new queries is from torch's on decoded rows, relative to the size of that."""
    layer = new_layer(name, config, 2, 512, device, dtype)
    q = torch.randn(2, config.num_attention_heads, T, config.head_dim, device=device).to(dtype)
    # (B, H, S, d) both
    K, V = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in layer.read())
    piece = kernels.attend_lines(q.float(), K, V, 0, layer.length, layer.length)
    want, _ = kernels.merge_lines(*(x[None] for x in piece))
    return ((layer.attended(q).out.float() - want).norm() / want.norm()).item()


def check(shape, device, dtypes=(torch.float16, torch.bfloat16)):
    """Every case's attention beside torch's. UserError if one is further off than 16 bits explain."""
    torch.manual_seed(0)
    config = config_of(shape, layers=2)
    print(f"{shape}, distance from torch's attention: {'':14}" + "".join(f"{str(t)[6:]:>20}" for t in dtypes))
    print(f"{'case':54}" + f"{'1 query':>10}{'40':>10}" * len(dtypes))
    wrong = []
    for name in CASES:
        errors = [off_by(name, config, T, device, dtype) for dtype in dtypes for T in (1, 40)]
        wrong += [name] if not max(errors) < 0.03 else []  # and not for NaN
        print(f"{name:54}" + "".join(f"{error:>10.5f}" for error in errors), flush=True)
    if wrong:
        raise UserError(f"the kernels are wrong on this device for {', '.join(wrong)}")


# Bench

def best_of(run):
    """Median milliseconds of a call on the GPU, the L2 cache flushed before each. It is replayed from a CUDA graph: the
    time that Python takes to start kernels is in `bench_decoding`, and not here."""
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return triton.testing.do_bench(graph.replay, warmup=20, rep=100, return_mode="median")


def bench_attention(shape, contexts, batches, names, device):
    """A line for each case: time, GB/s of what is held, share of the copy bandwidth, ratios to SDPA and to fp16."""
    config = config_of(shape, layers=2)
    block = torch.empty(2 ** 29 if device.type == "cuda" else 2 ** 10, dtype=torch.uint8, device=device)
    copy = 2 * block.nbytes / best_of(lambda: block.clone()) / 1e6  # GB/s, read and written
    print(f"\n{shape}, attention of one new token, SDPA by {SDPA.name}, copy bandwidth {copy:.0f} GB/s")
    print(f"{'context':>8}{'batch':>6}  {'case':30}{'ms':>9}{'GB/s':>8}{'of copy':>9}{'x SDPA':>8}{'x fp16':>8}")
    for context, B in itertools.product(contexts, batches):
        sdpa = fitting(time_sdpa, config, context, B, device)
        base = None
        for name in names:
            found = fitting(time_attention, name, config, context, B, device)
            if found is None:
                print(f"{context:>8}{B:>6}  {name:30}{'does not fit':>9}")
                continue
            ms, held = found
            speed = held / ms / 1e6
            base = ms if name == "fp16" else base
            ratios = "".join(f"{x / ms:>8.2f}" if x else f"{'-':>8}" for x in (sdpa, base))
            print(f"{context:>8}{B:>6}  {name:30}{ms:>9.3f}{speed:>8.0f}{speed / copy:>9.0%}{ratios}", flush=True)


def one_query(config, B, device):
    return torch.randn(B, config.num_attention_heads, 1, config.head_dim, device=device).to(torch.bfloat16)


def time_sdpa(config, context, B, device):
    """Milliseconds of torch's attention to 16-bit rows, by flash attention: which one torch takes varies."""
    K, V = torch.randn(2, B, config.num_key_value_heads, context, config.head_dim, device=device, dtype=torch.bfloat16)
    with sdpa_kernel(SDPA):
        return best_of(partial(F.scaled_dot_product_attention, one_query(config, B, device), K, V, enable_gqa=True))


def time_attention(name, config, context, B, device):
    """Milliseconds of a case's attention, and the bytes that its cache holds."""
    layer = new_layer(name, config, B, context, device, torch.bfloat16)
    held = sum(t.nbytes for part in (layer.keys, layer.values) for held in part.tensors().values() for t in held)
    return best_of(partial(layer.attended, one_query(config, B, device))), held


def bench_decoding(config, contexts, names, device, steps=32):
    """Tokens a second of one sequence whose cache holds so many random tokens."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(config).to(torch.bfloat16).requires_grad_(False)
    model.rope.freq = model.rope.freq.to(device)  # (d/2)
    model.use_attention("triton")
    print(f"\n{'case':30}" + "".join(f"{f'tok/s at {context}':>17}" for context in contexts))
    for name in names:
        speeds = [fitting(decoding, model, name, context, steps, device) or 0 for context in contexts]
        print(f"{name:30}" + "".join(f"{speed:>17.1f}" for speed in speeds), flush=True)


def decoding(model, name, context, steps, device):
    config = model.config
    cache = TritonCache(model, method_of(name, config, device))
    for layer in cache.layers:
        filled(layer, config, 1, context, device, model.lm_head.weight.dtype)
    new = torch.zeros(1, 1, dtype=torch.long, device=device)
    new = model.generate(new, 2, cache)[:, -1:]  # compiles what is not compiled yet
    new.tolist()  # waits for the GPU
    clock = time.perf_counter()
    model.generate(new, steps, cache)[0].tolist()
    return steps / (time.perf_counter() - clock)


def fitting(run, *args):
    """What run(*args) gives, or None if the GPU has no memory for it."""
    try:
        return run(*args)
    except torch.OutOfMemoryError:
        pass
    torch.cuda.empty_cache()  # only now: the exception held what had been allocated
    return None


def bench(device):
    if not torch.cuda.is_available():
        raise UserError("nothing can be timed without a GPU; `compile` and `check` need none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16")
    check("LLaMA-3-8B", device)
    contexts, names = [2 ** i * 1024 for i in range(2, 8)], list(CASES)
    for shape in SHAPES:
        bench_attention(shape, contexts, (1, 8), names, device)
    bench_decoding(config_of("LLaMA-3-8B"), (8192, 32768), names, device)


def main():
    p = cli.Parser(description=__doc__)
    p.add_argument("what", choices=["compile", "check", "bench"])
    p.add_argument("--quick", action="store_true", help="compile: a few cases only")
    with cli.one_line(p):
        args = p.parse_args()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if args.what == "compile":
            compile_all(args.quick)
        elif args.what == "bench":
            bench(device)
        else:
            check_device(device)
            check("LLaMA-3-8B", device)


if __name__ == "__main__":
    main()
