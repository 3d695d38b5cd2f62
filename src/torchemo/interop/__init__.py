"""EMO in your own training loop: plain torch, ``torch.func``, higher, TorchOpt, learn2learn.

The host keeps its loop; `torchemo.memory.emo.EMO` adds three lines, recall, combine and remember.
No host package is imported here: `torchemo.interop.higher.callback` needs none, and
`torchemo.interop.torchopt.transform` imports TorchOpt when it is called.
"""

from torchemo.interop.for_module import for_module as for_module
from torchemo.interop.one_task import as_task as as_task
from torchemo.interop.one_task import combine_one as combine_one
from torchemo.interop.plain import apply_ as apply_
from torchemo.interop.plain import gradients as gradients
