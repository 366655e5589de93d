"""What forked ranks would each import when first needed is imported once, here."""

import torch._dynamo
import torch.distributed.tensor  # noqa: F401
