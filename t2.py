import sys; sys.path.insert(0,'/tmp/bw')
from t1 import *
import functools
from nattn import mods, masks, functions
from nattn.dense import Dense
# finite differences in float64 through the reference backend
rng=np.random.default_rng(1)
def gate(score,b,h,q_idx,kv_idx,w): return np.where(q_idx-kv_idx<w, np.tanh(score)*score, score-1.0)
def check(B,H,Hk,N,M,D,Dv,wrt=("q","k","v"),**kw):
    q=rng.standard_normal((B,H,N,D));k=rng.standard_normal((B,Hk,M,D));v=rng.standard_normal((B,Hk,M,Dv));do=rng.standard_normal((B,H,N,Dv)); dl=rng.standard_normal((B,H,N))
    kw={n:(x() if callable(x) and n not in('score_mod','mask_mod') else x) for n,x in kw.items()}
    o,l=nattn.attention(q,k,v,return_lse=True,**kw)
    p=Problem.build(q,k,v,**kw)
    if not hasattr(p,'bias_shape'): object.__setattr__(p,'bias_shape',None if 'bias' not in kw else (1,)*(4-kw['bias'].ndim)+kw['bias'].shape)
    d1=np.where(np.isfinite(l),dl,0)
    g=bwd(p,do,o,l,wrt,d1)
    args={'q':q,'k':k,'v':v,**{n:kw[n] for n in wrt if n in kw}}
    def loss(**a):
        kk={**kw,**{n:x for n,x in a.items() if n not in 'qkv'}}
        o,l=nattn.attention(a.get('q',q),a.get('k',k),a.get('v',v),return_lse=True,**kk)
        return (o*do).sum()+(np.where(np.isfinite(l),l,0)*d1).sum()
    worst=0
    for n in wrt:
        x=args[n]; gg=g[n].reshape(-1)
        if n=='alibi_slopes': gg=(g[n].sum(0) if x.ndim==1 else g[n]).reshape(-1)
        for idx in rng.choice(x.size,min(6,x.size),replace=False):
            e=1e-6; a=x.copy(); a.reshape(-1)[idx]+=e; b=x.copy(); b.reshape(-1)[idx]-=e
            fd=(loss(**{n:a})-loss(**{n:b}))/(2*e)
            worst=max(worst,abs(fd-gg[idx])/(1+abs(fd)))
    print(list(kw),wrt,'%.2e'%worst, 'BAD' if worst>1e-6 else '', flush=True)
A=(2,4,2,40,70,16,24)
check(*A)
check(*A,causal=True,window_size=(20,-1))
check(*A,softcap=2.0)
check(*A,score_mod=functools.partial(gate,w=5),causal=True)
check(*A,score_mod=mods.compose(functools.partial(gate,w=5),functools.partial(mods.softcap,cap=3.0)),softcap=5.0)
check(*A,alibi_slopes=lambda: rng.random(4),wrt=("q","k","v","alibi_slopes"))
check(*A,alibi_slopes=lambda: rng.random((2,4)),softcap=2.0,wrt=("q","alibi_slopes"))
check(*A,sinks=lambda: rng.standard_normal(4),wrt=("q","k","v","sinks"))
for sh in ((40,70),(4,40,70),(2,1,40,70),(2,4,40,70),(1,4,1,70),(4,40,1),(2,1,1,1),(1,70),(2,4,1,70)):
    check(*A,bias=lambda: rng.standard_normal(sh),causal=True,score_mod=functools.partial(gate,w=5),wrt=("q","k","v","bias"))
check(*A,mask_mod=masks.causal)
check(*A,mask=lambda: rng.random((40,70))<.5,kv_lens=[70,13],q_lens=[40,0])
check(*A,dropout_p=.3,seed=5)
check(*A,dropout_p=.3,seed=5,softcap=2.0,causal=True,bias=lambda: rng.standard_normal((4,40,70)),sinks=lambda: rng.standard_normal(4),wrt=("q","k","v","bias","sinks"))
check(*A,wrt=("v",)); check(*A,wrt=("k",))
