"""The cells of docs/crossing.md, each a row of `eval_ppl.py`: fixed before they were measured, by results.py.

A cell is one choice of each of these, at so many bits:

    grid       static: a channel of the keys before RoPE, and a head of the values; from other text
               KIVI's: 128 tokens of a key's channel, or 32, and a token of the values; from the numbers themselves
               per token: of the keys after RoPE, and of the values
    zero       offset: the group's minimum; integer: a whole number of steps, so that 0 is a level
    kept       none; the first five (pfn); five found (kvsink); all that have a tenth of the largest mark, or more
               (marked); the five smallest keys of each head (ott)
    rotated    a Hadamard matrix over a head's channels; normed: a key divided by its token's norm (OScaR)

SmolLM2 reads pairs of a window and a draw of the calibration (results.py), the embedded model windows times draws.
"""
import itertools

OWN_FILE = "docs/programs/apart.py"
GRIDS = {"static": "channel-static", "KIVI's": "channel-dynamic", "per token": "token-dynamic"}
ZEROS, KEPT, TURNS = ("offset", "integer"), ("none", "marked"), (False, True)


def cell(bits, grid, zero="offset", kept="none", rotated=False, more=""):
    """A cell's row."""
    scheme = GRIDS[grid]
    method = {"none": "rtn", "first": "pfn", "found": "kvsink", "marked": "kvsink --threshold 0.1"}[kept]
    if rotated and grid == "KIVI's":
        scheme = "oscar --scale-tokens off"
    elif rotated:
        scheme += "-rotated"
        method = {"none": f"{OWN_FILE}:Plain", "marked": f"{OWN_FILE}:Marked"}[kept]
    if kept in ("found", "marked") and grid != "static":
        method += " {mark}"  # of which nothing is calibrated
    formula = " --formula integer-zero" if zero == "integer" else ""
    scheme = "" if scheme == "channel-static" else f" --scheme {scheme}"
    return f"{method} --bits {bits}{scheme}{formula}{more}"


def crossed(bits, grids=GRIDS):
    """Zero point by kept tokens by grid by rotation."""
    return [cell(bits, *each) for each in itertools.product(grids, ZEROS, KEPT, TURNS)]


# Static grids: marked tokens get something else than 16 bits, or a level lies elsewhere
APART = {"a code in the other tokens' grid, which was fitted without them":
         f"{OWN_FILE}:Marked --bits {{bits}} --marked range",
         "a grid of their own, with as few bits": f"{OWN_FILE}:Marked --bits {{bits}} --marked own"}
QUARTER = f"{OWN_FILE}:Plain --bits {{bits}} --scheme quarter"
STATIC = [*APART.values(), APART["a grid of their own, with as few bits"] + " --formula integer-zero", QUARTER]
# KIVI's grid at 2 bits: other tokens are kept; groups of 32, keys of one length
SMALL, SIZE = "ott --bits 2 --group-size 128 --outlier-num 5 --recent 0", " --group-size 32"
NORMED = "rtn --bits 2 --scheme oscar" + SIZE
KIVI = [SMALL, cell(2, "KIVI's", kept="first"), cell(2, "KIVI's", kept="found"), NORMED,
        *(cell(2, "KIVI's", kept=kept, rotated=turn, more=SIZE) for kept in KEPT for turn in TURNS),
        f"{OWN_FILE}:Marked {{mark}} --bits 2 --scheme channel-dynamic --marked own"]
CORNERS = [cell(3, grid, *each) for grid, *each in (
    ("static", "offset", "none"), ("static", "offset", "marked"), ("static", "integer", "none"),
    ("static", "integer", "marked"), ("KIVI's", "offset", "none"), ("KIVI's", "offset", "marked"),
    ("KIVI's", "offset", "marked", True))]
FOUR = [cell(4, grid, *each) for grid, *each in (
    ("static", "offset", "marked"), ("static", "integer", "none"), ("static", "integer", "marked"),
    ("KIVI's", "offset", "none"), ("KIVI's", "offset", "marked", True))]
LONGER = [cell(3, "KIVI's", "offset", kept, turn) for kept in KEPT for turn in TURNS]
CELLS = {  # of SmolLM2: {flags of the windows: {row: pairs}}
    "--context 512": {**dict.fromkeys(crossed(3), 12),
                      **dict.fromkeys([*crossed(2, ["KIVI's"]), *KIVI, *STATIC, *FOUR], 4)},
    "--context 4096": dict.fromkeys(LONGER, 3),
    "--context 512 --data tales": dict.fromkeys(CORNERS, 3)}
EMBEDDED = [*crossed(2), *STATIC]
# {tokens of a text: rows} of which needles.py asks for facts
ASKED = {1024: [*CORNERS, *FOUR, cell(3, "KIVI's", rotated=True)]}
