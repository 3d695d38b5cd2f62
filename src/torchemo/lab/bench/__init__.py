"""Speed: measured against other packages, against the machine's limit, and against size.

`torchemo bench` is the command. Every case runs in a fresh process (`torchemo.lab.bench.process`), its
variants are interleaved (`torchemo.lab.bench.clock`), and whole records are written with their environment
(`torchemo.lab.bench.record`).
"""
