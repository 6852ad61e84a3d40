"""Runs checks by name on this worker and writes what came out of them."""

import json
import os
import sys
import time

import tfaccum
from tests.multi_worker import checks


def main():
    strategy = tfaccum.make_strategy()
    results = {}
    for name in sys.argv[1:]:
        print(f"{time.process_time():.0f} s, begins {name}")
        results[name] = getattr(checks, name)(strategy)
    with open(os.environ["TFACCUM_RESULT"], "w") as file:
        json.dump(results, file)
    print(f"{time.process_time():.0f} s, has ended")


main()
