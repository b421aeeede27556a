"""`meshwright verify` over the full grid of layouts instead of a pairwise cover: hours for tiny.

    .venv/bin/python scripts/verify_grid.py tiny [key=value ...] [--part 0/8]

Exit code 1 when a layout differs from one device.
"""

from __future__ import annotations

import argparse
import sys

from meshwright.trainer.config.load import load
from meshwright.trainer.inspect.verify import possible_layouts, print_comparisons
from meshwright.trainer.runtime.devices import prepare_devices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    parser.add_argument("--part", default="0/1", help="of n equal parts the i-th, as i/n")
    options = parser.parse_args()
    config = load(options.config, *options.overrides)
    prepare_devices(config)
    part, parts = map(int, options.part.split("/"))
    layouts = list(possible_layouts(config))[part::parts]
    print(f"{len(layouts)} layouts")
    return 0 if print_comparisons(config, layouts) else 1


if __name__ == "__main__":
    sys.exit(main())
