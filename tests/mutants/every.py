"""All mutants of the matrix."""
from mutants import antkv, common, cq, intactkv, kivi, kvquant, kvsink, ott, pfn, rtn, skvq

FILES = [common, rtn, pfn, kvsink, kivi, ott, skvq, kvquant, cq, antkv, intactkv]
MUTANTS = [mutant for file in FILES for mutant in file.MUTANTS]
