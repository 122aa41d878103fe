"""Drafts for `jaxkv.Engine`: tokens that may come next, which one step of the model verifies.

Example::

    engine = jaxkv.Engine(                                  # forward returns hidden states
        forward, params, plan, head=head, drafts=NgramDrafts(4), max_requests=8, max_tokens=512
    )

`NgramDrafts` drafts what followed the last tokens of a request where they came before in it. Your
own are objects with the method and the attribute of `Drafter`. They run on the host: layers that
draft from hidden states of the model, as for multi-token prediction, are not served.
"""

from jaxkv._src.engine import Drafter, NgramDrafts

__all__ = ["Drafter", "NgramDrafts"]
