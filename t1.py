import sys; sys.path.insert(0,'/tmp/bw')
from drv import ref
import numpy as np, nattn, time, numba
from nattn.problem import Problem
from nattn.cpu import launch, fma_peak
def bwd(p,do,o,l,wrt=("q","k","v"),dlse=None): return launch.backward(p,do,o,l,dlse,frozenset(wrt))
if __name__=='__main__':
    rng=np.random.default_rng(0)
    for dt in ('f4','f8'):
      for (B,H,Hk,N,M,D,Dv,c) in ((1,2,2,100,100,64,64,0),(2,4,2,70,133,40,24,0),(1,2,1,150,200,64,64,1),(1,1,1,1500,1500,33,7,1)):
        q=rng.standard_normal((B,H,N,D)).astype(dt);k=rng.standard_normal((B,Hk,M,D)).astype(dt);v=rng.standard_normal((B,Hk,M,Dv)).astype(dt);do=rng.standard_normal((B,H,N,Dv)).astype(dt)
        o,l=nattn.attention(q,k,v,causal=bool(c),return_lse=True)
        p=Problem.build(q,k,v,causal=bool(c)); t=time.time()
        g=bwd(p,do,o,l); r=ref(q,k,v,do,c); print(dt,B,H,N,M,D,[float(np.abs(a-b).max()) for a,b in zip(g.values(),r)],'%.1fs'%(time.time()-t),flush=True)
    numba.set_num_threads(1)
    for (H,N,D,Hk) in ((2,2048,64,2),(2,2048,128,2),(4,2048,64,1)):
      for c in (0,1):
        q,do=(rng.standard_normal((1,H,N,D),dtype='f4') for _ in range(2)); k,v=(rng.standard_normal((1,Hk,N,D),dtype='f4') for _ in range(2))
        o,l=nattn.attention(q,k,v,causal=bool(c),return_lse=True); p=Problem.build(q,k,v,causal=bool(c)); bwd(p,do,o,l); R=[]
        for _ in range(7):
            a=fma_peak('float32',1,.01); s=time.perf_counter(); bwd(p,do,o,l); s=time.perf_counter()-s
            R.append(10*H*N*N*D*(.5 if c else 1)/s/1e9/a*100)
        print(H,Hk,N,D,c,'%.1f'%np.median(R),'max %.1f'%max(R),flush=True)
