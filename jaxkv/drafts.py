"""Drafts for `jaxkv.Engine`: tokens that may come next, which one step of the model verifies.

Example::

    drafts = NgramDrafts(max_tokens=4)
    options = {"drafts": drafts}    # of jaxkv.Engine, with head=: forward returns hidden states

`NgramDrafts` drafts what followed the last tokens of a request where they came before in it. Your
own are objects with the method and the attribute of `Drafter`. They run on the host: layers that
draft from hidden states of the model, as for multi-token prediction, are not served.
"""

from jaxkv._src.engine import Drafter, NgramDrafts

__all__ = ["Drafter", "NgramDrafts"]
