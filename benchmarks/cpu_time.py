"""Another benchmark, timed by the CPU time of its process instead of the clock: for one thread on a machine that is busy.

    python benchmarks/cpu_time.py benchmarks/grammars.py speed --temperature 1

The engine's own times are counted so too, and with them the costs from which policies decide. Time that the process waits does
not count, so this is for benchmarks whose work is all done in it.
"""

import runpy
import sys
import time

if __name__ == "__main__":
    time.perf_counter = time.process_time  # before anything of volley is imported
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
