"""Training in stages on several processes.

Import from its modules: ``plan`` and ``estimate`` are pure functions, ``stages`` cuts a decoder, ``schedules`` asks
PyTorch in which order ranks work, and ``pipeline`` has ``Pipeline``, which trains. Nothing is imported here, since
PyTorch's pipelining brings its compiler with it and a plan needs neither.
"""

__all__: list[str] = []
