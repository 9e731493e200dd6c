"""Graph neural networks on node classification: GCN, GAT, GraphSAGE, GCNII."""

import warnings

from ..._errors import require

require("torch_geometric", "gnn", "The family 'gnn'")

with warnings.catch_warnings():
    # Its import uses parts of torch that newer versions of torch deprecate; none of them is ours.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch_geometric.nn  # noqa: F401

from .family import Gnn, GnnConfig, SamplingConfig  # noqa: E402

__all__ = ["Gnn", "GnnConfig", "SamplingConfig"]
