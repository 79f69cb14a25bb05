"""What the methods stand on, measured on any model and text: `python -m tinykv.analysis WHAT`.

    walk.py           one forward of a window, seen from inside; every measurement begins with it
    sinks.py          where attention sinks are, and what goes with them in fp16 (KVSink, OTT)
    quantization.py   how attention sinks and quantization error affect each other (KVSink)
    prefixes.py       what an exact prefix leaves of the error of quantized weights (IntactKV)
    anchors.py        anchor scores beside the damage that they stand for (AnTKV)
    maps.py           one layer whole, token by channel (KVSink, IntactKV, AnTKV)
    figures.py        the figures of these, and that of eval_ppl.py
"""
