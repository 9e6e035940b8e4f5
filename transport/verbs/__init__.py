"""The ``verbs`` fabric: RDMA over reliable connections. Imported on demand only; needs the extra ``afore[rdma]`` to run."""
