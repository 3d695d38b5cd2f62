"""One measurement in this process: ``python -m torchemo.lab.bench NAME keep < request.json``."""

import json
import sys

from torchemo.lab.bench.process import measure_here

name, allocator = sys.argv[1:]
found = measure_here(name, json.load(sys.stdin), keep=allocator == "keep")
sys.stdout.write("\n" + json.dumps(found) + "\n")
