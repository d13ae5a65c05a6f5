"""temporary"""
from outrider.providers.wire.graph import *
def _p(x):
    if isinstance(x, TensorRef): return {"t":[x.dtype,list(x.shape),x.offset,x.nbytes,x.segment,x.path,x.file_size,x.file_mtime_ns,x.packed]}
    if isinstance(x, Graph): return {"g":pack_graph(x)}
    if isinstance(x,(list,tuple)): return [_p(i) for i in x]
    return x
def _u(x):
    if isinstance(x, dict):
        if "t" in x:
            t=x["t"]; return TensorRef(t[0],tuple(t[1]),*t[2:])
        return unpack_graph(x["g"])
    if isinstance(x,list): return [_u(i) for i in x]
    return x
def _v(v): return [v.name,v.dtype,None if v.shape is None else list(v.shape),v.constant]
def _uv(v): return Value(v[0],v[1],None if v[2] is None else tuple(v[2]),v[3])
def _n(n): return [n.index,n.name,n.op_type,n.domain,n.opset,{k:_p(a) for k,a in n.attributes.items()},[_v(v) for v in n.inputs],[_v(v) for v in n.outputs],[_v(v) for v in n.captures],n.overload,None if n.lowered is None else [_n(l) for l in n.lowered],dict(n.metadata),[],list(n.origin)]
def _un(n): return Node(n[0],n[1],n[2],n[3],n[4],{k:_u(a) for k,a in n[5].items()},tuple(map(_uv,n[6])),tuple(map(_uv,n[7])),tuple(map(_uv,n[8])),n[9],None if n[10] is None else tuple(map(_un,n[10])),n[11],(),tuple(n[13]))
def pack_graph(g): return {"name":g.name,"nodes":[_n(n) for n in g.nodes],"inputs":[_v(v) for v in g.inputs],"outputs":[_v(v) for v in g.outputs],"constants":{k:_p(v) for k,v in g.constants.items()},"opsets":dict(g.opsets)}
def unpack_graph(d): return Graph(d["name"],tuple(map(_un,d["nodes"])),tuple(map(_uv,d["inputs"])),tuple(map(_uv,d["outputs"])),{k:_u(v) for k,v in d["constants"].items()},d["opsets"])
