"""Models without memory for their weights, which are assigned later."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.initialization import no_init_weights


@contextmanager
def unfilled() -> Iterator[None]:
    """Parameters of modules made inside are on the meta device, and tied to no other; buffers are real.

    Made under ``torch.device("meta")`` instead buffers would have to be made again, and operations that PyTorch computes there in
    Python import its compiler, with 70 MiB.
    """
    thread = get_ident()

    def emptied(_: nn.Module, __: str, own: nn.Parameter) -> nn.Parameter | None:
        if get_ident() != thread:
            return None
        return nn.Parameter(torch.empty_like(own, device="meta"), own.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        with no_init_weights():
            yield
    finally:
        hook.remove()
