"""Probes: pure functions from activations and beliefs to results that carry their own nulls.

Names are loaded on first use, so that ``import probes`` stays cheap.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
