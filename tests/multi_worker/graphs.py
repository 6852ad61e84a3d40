"""Counts operations in everything that TensorFlow traces."""

import contextlib
import functools

import numpy as np
import tensorflow as tf

COLLECTIVES = (
    "CollectiveReduce",
    "CollectiveReduceV2",
    "CollectiveReduceV3",
    "CollectiveGather",
    "CollectiveGatherV2",
    "CollectiveBcastSendV2",
    "CollectiveBcastRecvV2",
    "CollectiveAllToAllV2",
    "CollectiveReduceScatterV2",
    "NcclAllReduce",
)


@contextlib.contextmanager
def traced():
    """Lists the graph of each `tf.function` made and traced inside."""
    original, graphs = tf.function, []

    def function(python_function=None, **arguments):
        if python_function is None:
            return lambda python: function(python, **arguments)

        @functools.wraps(python_function)
        def noting(*args):
            graphs.append(tf.compat.v1.get_default_graph())
            return python_function(*args)

        return original(noting, **arguments)

    tf.function = function
    try:
        yield graphs
    finally:
        tf.function = original


def operations(graph):
    """(type, name) of all operations in a graph and in what it calls.

    The body of a function counts once for each place that calls it, a loop's
    body once, and of a condition both branches.
    """
    definition = graph.as_graph_def()
    bodies = {f.signature.name: f.node_def for f in definition.library.function}

    def walk(nodes):
        for node in nodes:
            yield node.op, node.name
            for value in node.attr.values():
                for function in [value.func, *value.list.func]:
                    yield from walk(bodies.get(function.name, ()))

    return list(walk(definition.node))


def collectives(graph):
    """Types of all operations of a graph that communicate."""
    return [op for op, _ in operations(graph) if op in COLLECTIVES]


def of_shape(graph, shape):
    """Types of all operations of a graph with a result of this shape."""
    definition = graph.as_graph_def(add_shapes=True)
    bodies = [f.node_def for f in definition.library.function]
    return {
        node.op
        for nodes in (definition.node, *bodies)
        for node in nodes
        for found in node.attr["_output_shapes"].list.shape
        if [dim.size for dim in found.dim] == list(shape)
    }


def collective_sizes(graph):
    """Elements of each all-reduce of a graph, listed by dtype."""
    definition = graph.as_graph_def(add_shapes=True)
    bodies = {f.signature.name: f for f in definition.library.function}
    found = {}

    def note(node, shape):
        dtype = tf.as_dtype(node.attr["T"].type).name
        sizes = [dim.size for dim in shape.dim]
        found.setdefault(dtype, []).append(int(np.prod(sizes)))

    def walk(nodes):
        for node in nodes:
            if node.op.startswith("CollectiveReduce"):
                note(node, node.attr["_output_shapes"].list.shape[0])
            for value in node.attr.values():
                for function in [value.func, *value.list.func]:
                    if function.name in bodies:
                        walk(bodies[function.name].node_def)

    walk(definition.node)
    return found
