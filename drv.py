import numpy as np, ctypes, struct, time, sys, numba
sys.path.insert(0,'/tmp/bw')
import nattn
from nattn.problem import Problem
from nattn.cpu import tiles, threads, launch, backward as bwd, fma_peak
def backward(p, dout, out, lse, T=None, block=None, parts=None):
    dtype='float32' if p.dtype.itemsize==4 else 'float64'
    tile=tiles.choose_tile(dtype, 1<<20); wide=tiles.wide_tile(dtype)
    block=block or tiles.backward_block(dtype,p.D,p.Dv)
    nb=-(-p.Nk//block); parts=parts or max(1,min(8,p.Nk//512)); pb=-(-nb//parts); parts=-(-nb//pb)
    rows=p.group*p.Nq; nt=-(-rows//tile.lanes); T=min(T or 4, nt)
    lay=tiles.backward_layout(tile,wide,block,T,p.D,p.Dv,bwd.AREAS)
    step=wide.W*wide.MV; pD=-(-p.D//step)*step; pDv=-(-p.Dv//step)*step; pN=-(-p.Nk//16)*16+16
    items=p.B*p.Hkv
    dq=np.zeros((parts,items,p.group,p.Nq,p.D),p.dtype); dk=np.zeros((p.B,p.Hkv,pN,pD),p.dtype); dv=np.zeros((p.B,p.Hkv,pN,pDv),p.dtype)
    delta=np.einsum('bhnd,bhnd->bhn',dout,out)
    n_tasks=items*parts; workers=min(threads.thread_count(),n_tasks)
    scratch=np.zeros(workers*lay['end']+64,np.uint8); control=threads.new_control(n_tasks)
    f=struct.Struct(f"{len(bwd.ARGS.integers)}q{len(bwd.ARGS.reals)}d").pack
    left,right=p.window
    args=f(p.q.ctypes.data,*p.q.strides,p.k.ctypes.data,*p.k.strides,p.v.ctypes.data,*p.v.strides,dout.ctypes.data,*dout.strides,
      lse.ctypes.data,delta.ctypes.data,dq.ctypes.data,dk.ctypes.data,dv.ctypes.data,pN,pD,pDv,0,0,0,0,0,0,0,0,p.Hq,p.Hkv,p.group,p.Nq,p.Nk,p.D,p.Dv,block,
      p.B,0,items,parts,pb,rows,nt,T,p.q_offset.ctypes.data,p.q_lens.ctypes.data,p.kv_lens.ctypes.data,p.causal,-1 if left is None else left,-1 if right is None else right,
      0,0,0,0,0,0,0,0,0,0,0,0,ctypes.addressof(control),-(-scratch.ctypes.data//64)*64,lay['end'],*(lay[n] for n in bwd.AREAS),p.scale,1.0)
    threads.run(bwd.backward_worker(tile,wide),args,control,workers,1e12,keep=(p,dout,out,lse,delta,dq,dk,dv,scratch,control))
    return dq.sum(0).reshape(p.B,p.Hq,p.Nq,p.D), dk[:,:,:p.Nk,:p.D], dv[:,:,:p.Nk,:p.Dv]
def ref(q,k,v,do,causal):
    q,k,v,do=(x.astype('f8') for x in (q,k,v,do)); g=q.shape[1]//k.shape[1]; K=np.repeat(k,g,1); V=np.repeat(v,g,1)
    sc=1/np.sqrt(q.shape[-1]); s=sc*q@K.swapaxes(-1,-2)
    N,M=s.shape[-2:]
    if causal: s=np.where(np.tril(np.ones((N,M),bool),M-N),s,-np.inf)
    p=np.exp(s-s.max(-1,keepdims=True)); p/=p.sum(-1,keepdims=True)
    dp=do@V.swapaxes(-1,-2); ds=p*(dp-(p*dp).sum(-1,keepdims=True))*sc
    f=lambda x: x.reshape(k.shape[0],k.shape[1],g,*x.shape[2:]).sum(2)
    return ds@K, f(ds.swapaxes(-1,-2)@q), f(p.swapaxes(-1,-2)@do)
if __name__=='__main__':
    rng=np.random.default_rng(0)
    for dt in ('f4','f8'):
      for (B,H,Hk,N,M,D,Dv,c) in ((1,2,2,100,100,64,64,0),(2,4,2,70,133,40,24,0),(1,2,1,150,200,64,64,1),(1,1,1,1500,1500,33,7,1)):
        q=rng.standard_normal((B,H,N,D)).astype(dt);k=rng.standard_normal((B,Hk,M,D)).astype(dt);v=rng.standard_normal((B,Hk,M,Dv)).astype(dt);do=rng.standard_normal((B,H,N,Dv)).astype(dt)
        o,l=nattn.attention(q,k,v,causal=bool(c),return_lse=True)
        p=Problem.build(q,k,v,causal=bool(c)); t=time.time()
        g=backward(p,do,o,l); r=ref(q,k,v,do,c); print(dt,B,H,N,M,D,[float(np.abs(a-b).max()) for a,b in zip(g,r)],'%.1fs'%(time.time()-t),flush=True)
