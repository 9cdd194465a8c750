import sys; sys.path.insert(0,'/tmp/bw')
from t1 import *
import functools
from nattn import mods
# speed of options vs plain backward, 1 thread
numba.set_num_threads(1)
rng=np.random.default_rng(0)
H,N,D=2,2048,64
q,k,v,do=(rng.standard_normal((1,H,N,D),dtype='f4') for _ in range(4))
def gate(score,b,h,q_idx,kv_idx): return np.where(q_idx-kv_idx<64, np.tanh(score)*score, score)
V={'plain':({},("q","k","v")),'softcap':(dict(softcap=20.0),("q","k","v")),'gate':(dict(score_mod=gate),("q","k","v")),'alibi':(dict(alibi_slopes=np.ones(H)*.1),("q","k","v")),
'dbias full':(dict(bias=np.zeros((1,H,N,N),'f4')),("q","k","v","bias")),'dbias col':(dict(bias=np.zeros((1,H,1,N),'f4')),("q","k","v","bias")),'dropout':(dict(dropout_p=.1,seed=1),("q","k","v"))}
P={}
for n,(kw,w) in V.items():
    o,l=nattn.attention(q,k,v,return_lse=True,**kw); p=Problem.build(q,k,v,**kw)
    if 'bias' in kw: object.__setattr__(p,'bias_shape',kw['bias'].shape)
    P[n]=(p,o,l,w); bwd(p,do,o,l,w)
T={n:[] for n in P}
for _ in range(7):
    for n,(p,o,l,w) in P.items():
        s=time.perf_counter(); bwd(p,do,o,l,w); T[n].append(time.perf_counter()-s)
for n in P: print('%10s %.3f'%(n,np.median(np.array(T['plain'])/np.array(T[n]))))
