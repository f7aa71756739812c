"""Wind tunnels: tasks whose exact Bayesian posterior is known at every position.

Names are loaded on first use, so that ``import tasks`` stays cheap.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
