"""What is studied: hooked models, training, checkpoints, and the battery of probes run on them.

Names are loaded on first use, so that ``import interp`` stays cheap.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
