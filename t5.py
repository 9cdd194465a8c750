import sys; sys.path.insert(0,'/tmp/bw')
from t1 import *
rng=np.random.default_rng(0)
H,N,D=1,8192,64
q,k,v,do=(rng.standard_normal((1,H,N,D),dtype='f4') for _ in range(4))
for c in (False,True):
    o,l=nattn.attention(q,k,v,return_lse=True,causal=c); p=Problem.build(q,k,v,causal=c)
    T={1:[],2:[]}
    for _ in range(5):
        for n in (1,2):
            numba.set_num_threads(n); bwd(p,do,o,l); s=time.perf_counter(); bwd(p,do,o,l); T[n].append(time.perf_counter()-s)
    print(c,np.median(np.array(T[1])/np.array(T[2])), np.median(T[1]))
