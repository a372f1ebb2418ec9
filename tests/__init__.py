"""Without a GPU, Triton's kernels run in its interpreter, which has to be asked for before anything imports Triton."""

import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"
